// Package docs embeds the documents for users, so that `sandboxd docs` prints them without a network.
package docs

import "embed"

// FS holds the documents.
//
//go:embed *.md guides/*.md reference/*.md explain/*.md coming-from/*.md
var FS embed.FS

// OpenAPI is the OpenAPI document of the API.
//
//go:embed reference/openapi.json
var OpenAPI []byte
