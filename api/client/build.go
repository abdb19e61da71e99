package client

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"

	"github.com/sandboxd/sandboxd/api"
)

// Build builds an image from a context, which is a tar stream, plain or compressed with gzip or
// zstd. It calls progress, which may be nil, for every event but the last. If ctx ends, the build
// is stopped; the cache keeps the steps that were complete.
func (c *Client) Build(ctx context.Context, buildContext io.Reader, opts api.Build, progress func(api.BuildEvent)) (*api.Image, error) {
	options, err := json.Marshal(opts)
	if err != nil {
		return nil, fmt.Errorf("encode the options: %w", err)
	}
	secrets, err := encodeSecrets(opts.Secrets)
	if err != nil {
		return nil, err
	}
	var image *api.Image
	err = c.lines(ctx, request{
		method: http.MethodPost, path: []string{"v1", "builds"}, query: url.Values{"options": {string(options)}},
		body: readOnly(buildContext), typ: api.TypeTar, secrets: secrets,
	}, func(line []byte) error {
		var e api.BuildEvent
		if err := json.Unmarshal(line, &e); err != nil {
			return fmt.Errorf("decode a build event: %w", err)
		}
		switch {
		case e.Error != nil:
			return e.Error
		case e.Image != nil:
			image = e.Image
			return errEnd
		case progress != nil:
			progress(e)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if image == nil {
		return nil, errors.New("the daemon ended the build without a result")
	}
	return image, nil
}

// encodeSecrets returns the value of [api.HeaderBuildSecrets].
func encodeSecrets(secrets map[string][]byte) (string, error) {
	if len(secrets) == 0 {
		return "", nil
	}
	data, err := json.Marshal(secrets)
	if err != nil {
		return "", fmt.Errorf("encode the secrets: %w", err)
	}
	header := base64.StdEncoding.EncodeToString(data)
	if len(header) > api.MaxBuildSecrets {
		return "", fmt.Errorf("the secrets of a build take %d bytes, encoded twice, and %d are allowed", len(header), api.MaxBuildSecrets)
	}
	return header, nil
}
