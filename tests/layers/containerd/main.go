// Command containerd-apply applies layers with containerd's own code: containerd-apply DIR
// LAYER.tar... It has a module of its own, because containerd's brings some twenty others that
// nothing else here needs.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/containerd/containerd/v2/pkg/archive"
)

func main() {
	for _, name := range os.Args[2:] {
		if err := apply(os.Args[1], name); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}

func apply(dir, name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := archive.Apply(context.Background(), dir, f); err != nil {
		return fmt.Errorf("apply %s: %w", name, err)
	}
	return nil
}
