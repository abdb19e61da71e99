// Command prober is a small program that package network puts into sandboxes. It reads a list of
// operations of the network, does one after another, and prints their results. It is static, so
// that it runs in any image.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/sandboxd/sandboxd/tests/network/op"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "prober:", err)
		os.Exit(1)
	}
}

func run() error {
	var ops []op.Op
	if err := json.NewDecoder(os.Stdin).Decode(&ops); err != nil {
		return fmt.Errorf("read the operations: %w", err)
	}
	out := json.NewEncoder(os.Stdout)
	for i := range ops {
		if err := out.Encode(ops[i].Do()); err != nil { // each at once: a later one may hang
			return fmt.Errorf("write a result: %w", err)
		}
	}
	return nil
}
