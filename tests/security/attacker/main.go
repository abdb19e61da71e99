// Command attacker is a small program that contains the attack corpus: package security puts it
// into sandboxes and runs it where the layers that should stop it are off. It is static, so that
// it runs in any image.
package main

import (
	"fmt"
	"os"

	"github.com/sandboxd/sandboxd/internal/attack"
)

func main() {
	code, handled := attack.Main(os.Args[1:])
	if !handled {
		fmt.Fprintln(os.Stderr, "attacker: started by tests, as attacker attack …")
		code = 2
	}
	os.Exit(code)
}
