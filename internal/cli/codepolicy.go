package cli

import (
	"fmt"

	"github.com/sandboxd/sandboxd/internal/cmdline"
	"github.com/sandboxd/sandboxd/internal/document"
	"github.com/sandboxd/sandboxd/interpreter/codepolicy"
)

// codePolicyDocument returns the code policy that a user names: presets joined by commas, or a
// file, whose name has a slash or a dot. Its mistakes are told with their places.
func codePolicyDocument(name string) ([]byte, error) {
	doc, err := cmdline.PolicyDocument(name, codepolicy.Named)
	if err != nil {
		return nil, err
	}
	_, err = codepolicy.Parse(doc)
	if all := document.Mistakes(err); len(all) > 1 {
		return nil, fmt.Errorf("%s:%w; and %d more mistakes", name, all[0], len(all)-1)
	} else if len(all) == 1 {
		return nil, fmt.Errorf("%s:%w", name, all[0])
	}
	return doc, err
}

// readCodePolicy returns the code policy that a user names.
func readCodePolicy(name string) (*codepolicy.Policy, error) {
	doc, err := codePolicyDocument(name)
	if err != nil {
		return nil, err
	}
	return codepolicy.Parse(doc)
}
