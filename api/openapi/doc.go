// Package openapi describes the API as an OpenAPI 3.1 document.
//
// [Operations] is the table of routes with their parameters, bodies and examples; [Build] adds the
// schemas of the wire types, by reflection over package api, with the comments of its source as
// descriptions. The result is docs/reference/openapi.json, and [Reference] writes the same table
// for readers. `go test ./api/openapi -update` writes both.
//
// Only tests and generators import this package. A test of the daemon compares the table with the
// daemon's routes, and tests/harness validates every response against the document.
package openapi
