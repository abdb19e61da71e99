// Package docs embeds the documents for users; `sandboxd docs` prints them offline.
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
