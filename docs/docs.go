// Package docs embeds the documents for users, so that `sandboxd docs` prints them without a
// network.
package docs

import "embed"

// FS holds the documents, and the OpenAPI document of the API.
//
//go:embed *.md reference
var FS embed.FS
