//go:build !amd64

package attack

func processorControl() []Attack { return nil }

func processorAround() []Attack { return nil }
