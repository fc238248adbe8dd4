package config

import _ "embed"

// Schema is the configuration's JSON Schema, for editors. A test generates it from
// Config's fields, their tags and comments, and compares the file with that.
//
//go:embed schema.json
var Schema []byte
