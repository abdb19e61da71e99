package facesock

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// minToken is the least number of characters of a token.
const minToken = 20

// Token reads the token that clients of a face on TCP need, or makes one if path does not exist.
// Other users must be able neither to read the file nor to choose it.
func Token(path string) (string, error) {
	made := rand.Text()
	// Written beside and linked, so that a face that starts meanwhile reads a whole token.
	beside := path + "." + rand.Text()
	err := os.WriteFile(beside, []byte(made+"\n"), 0o600)
	if err == nil {
		err = os.Link(beside, path)
	}
	_ = os.Remove(beside) // if it was made
	if err == nil {
		return made, nil
	}
	if !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("make a token: %w", err)
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return "", fmt.Errorf("read the token: %w", err)
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return "", fmt.Errorf("read the token: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || int(st.Uid) != os.Geteuid() || st.Mode&0o077 != 0 {
		return "", fmt.Errorf("%s: not a file of yours that only you can read; remove it, and a new one is made", path)
	}
	data, err := io.ReadAll(io.LimitReader(f, 4096))
	if err != nil {
		return "", fmt.Errorf("read the token: %w", err)
	}
	token := strings.TrimSpace(string(data))
	if len(token) < minToken {
		return "", fmt.Errorf("%s: a token has at least %d characters; remove it, and a new one is made", path, minToken)
	}
	return token, nil
}
