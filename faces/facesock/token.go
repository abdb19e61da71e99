package facesock

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/dirs"
)

// minToken is the least number of characters of a token.
const minToken = 20

// TokenPath returns the path for the token of a face, which has a name: beside the daemon's socket,
// or in the caller's runtime directory if the socket's is another user's. A tenant of a daemon can
// write there only.
func TokenPath(socket, name string) (string, error) {
	return tokenPath(socket, name, os.Geteuid(), dirs.Default)
}

func tokenPath(socket, name string, uid int, own func() (dirs.Dirs, error)) (string, error) {
	dir := filepath.Dir(socket)
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return "", fmt.Errorf("find a directory for the token: %w", &fs.PathError{Op: "stat", Path: dir, Err: err})
	}
	if int(st.Uid) == uid {
		return filepath.Join(dir, name), nil
	}
	d, err := own()
	if err == nil {
		err = os.MkdirAll(d.Runtime, 0o700)
	}
	if err != nil {
		return "", fmt.Errorf("find a directory for the token: %w", err)
	}
	return filepath.Join(d.Runtime, name), nil
}

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
