package docker

import (
	"crypto/sha256"
	"encoding/hex"
	"strconv"
	"strings"
)

// Docker's IDs have 64 hexadecimal digits. The first 15 are the 60 bits of a sandbox's ID, and the
// rest is a hash of it, so that an ID says which sandbox it means without a table.
const (
	idLength = 64
	idDigits = 15
	ourID    = 12 // characters
)

// Alphabets of our IDs: of sandboxes, and of execs.
const (
	sandboxAlphabet = "abcdefghjkmnpqrstuvwxyz023456789"
	execAlphabet    = "abcdefghijklmnopqrstuvwxyz234567"
)

// pack returns the 60 bits of one of our IDs in hexadecimal digits.
func pack(id, alphabet string) (string, bool) {
	if len(id) != ourID {
		return "", false
	}
	var n uint64
	for i := range len(id) {
		at := strings.IndexByte(alphabet, id[i])
		if at < 0 {
			return "", false
		}
		n = n<<5 | uint64(at)
	}
	digits := strconv.FormatUint(n, 16)
	return strings.Repeat("0", idDigits-len(digits)) + digits, true
}

// unpack undoes pack.
func unpack(digits, alphabet string) (string, bool) {
	if len(digits) != idDigits || strings.ToLower(digits) != digits {
		return "", false
	}
	n, err := strconv.ParseUint(digits, 16, 60)
	if err != nil {
		return "", false
	}
	var id [ourID]byte
	for i := ourID - 1; i >= 0; i-- {
		id[i] = alphabet[n&31]
		n >>= 5
	}
	return string(id[:]), true
}

// fill returns digits followed by as much of their hash as an ID of Docker has room for.
func fill(digits string) string {
	sum := sha256.Sum256([]byte(digits))
	return (digits + hex.EncodeToString(sum[:]))[:idLength]
}

// containerID returns Docker's ID of the sandbox with this ID.
func containerID(sandbox string) string {
	digits, ok := pack(sandbox, sandboxAlphabet)
	if !ok {
		sum := sha256.Sum256([]byte(sandbox))
		return hex.EncodeToString(sum[:])
	}
	return fill(digits)
}

// sandboxID undoes containerID.
func sandboxID(id string) (string, bool) {
	if len(id) != idLength || fill(id[:idDigits]) != id {
		return "", false
	}
	return unpack(id[:idDigits], sandboxAlphabet)
}

// execID returns Docker's ID of an exec of a sandbox.
func execID(sandbox, exec string) string {
	of, ok1 := pack(sandbox, sandboxAlphabet)
	x, ok2 := pack(exec, execAlphabet)
	if !ok1 || !ok2 {
		return ""
	}
	return fill(x + of)
}

// execOf undoes execID.
func execOf(id string) (sandbox, exec string, ok bool) {
	if len(id) != idLength || fill(id[:2*idDigits]) != id {
		return "", "", false
	}
	exec, ok1 := unpack(id[:idDigits], execAlphabet)
	sandbox, ok2 := unpack(id[idDigits:2*idDigits], sandboxAlphabet)
	return sandbox, exec, ok1 && ok2
}

// isHex reports whether s may be the beginning of an ID.
func isHex(s string) bool {
	return s != "" && len(s) <= idLength && strings.Trim(s, "0123456789abcdef") == ""
}
