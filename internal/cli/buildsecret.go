package cli

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/internal/cmdline"
)

// readSecrets reads the secrets of a build, each of which is given as Docker's --secret.
func readSecrets(given []string) (map[string][]byte, error) {
	var secrets map[string][]byte
	for _, text := range given {
		s, err := parseSecret(text)
		if err != nil {
			return nil, cmdline.Usagef("--secret %q: %w", text, err)
		}
		if _, twice := secrets[s.id]; twice {
			return nil, cmdline.Usagef("--secret: two have the id %q", s.id)
		}
		value, err := s.read()
		if err != nil {
			return nil, fmt.Errorf("read the secret %q: %w", s.id, err)
		}
		if secrets == nil {
			secrets = make(map[string][]byte)
		}
		secrets[s.id] = value
	}
	return secrets, nil
}

// buildSecret is a --secret of a build. At most one of file and variable is set.
type buildSecret struct{ id, file, variable string }

func parseSecret(text string) (s buildSecret, err error) {
	kind := ""
	for field := range strings.SplitSeq(text, ",") {
		key, value, ok := strings.Cut(field, "=")
		if !ok || value == "" {
			return s, fmt.Errorf("%q is not KEY=VALUE, as in id=npmrc,src=.npmrc", field)
		}
		switch strings.ToLower(key) {
		case "id":
			s.id = value
		case "src", "source":
			s.file = value
		case "env":
			s.variable = value
		case "type":
			kind = value
		default:
			return s, fmt.Errorf("there is no key %q: give id and src or env", key)
		}
	}
	switch {
	case s.id == "":
		return s, errors.New("the id is missing, as in id=npmrc,src=.npmrc")
	case s.file != "" && s.variable != "":
		return s, errors.New("src is a file and env a variable; give one of them")
	case kind == "env" && s.variable == "":
		s.variable, s.file = s.file, "" // as Docker reads it
		if s.variable == "" {
			s.variable = s.id
		}
	case kind == "file" && s.variable != "":
		return s, errors.New("type=file takes src, not env")
	case kind == "file" && s.file == "":
		s.file = s.id
	case kind != "" && kind != "file" && kind != "env":
		return s, fmt.Errorf("type %q: there are file and env", kind)
	}
	return s, nil
}

func (s *buildSecret) read() ([]byte, error) {
	if s.file == "" {
		name := s.variable
		if name == "" {
			name = s.id
		}
		if value, ok := os.LookupEnv(name); ok {
			return []byte(value), nil
		}
		if s.variable != "" {
			return nil, fmt.Errorf("the variable %s is not set", s.variable)
		}
		s.file = s.id
	}
	f, err := os.Open(s.file)
	if err != nil {
		return nil, err
	}
	defer f.Close() // only read
	data, err := io.ReadAll(io.LimitReader(f, api.MaxBuildSecrets+1))
	if err == nil && len(data) > api.MaxBuildSecrets {
		err = fmt.Errorf("%s has more than %d bytes", s.file, api.MaxBuildSecrets)
	}
	return data, err
}
