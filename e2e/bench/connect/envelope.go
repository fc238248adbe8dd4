package connect

import "encoding/json"

// Columns are those of a table that the sink can write, with the names and types
// that Envelope describes.
const Columns = `id uuid PRIMARY KEY, payload jsonb NOT NULL`

// schema stands in every message. Debezium takes the columns' types from the
// names of the fields' types.
const schema = `{"type":"struct","fields":[` +
	`{"field":"id","type":"string","name":"io.debezium.data.Uuid"},` +
	`{"field":"payload","type":"string","name":"io.debezium.data.Json"}]}`

// Envelope is a message's value as Connect's JSON converter wants it, the schema
// included. The payload is JSON; the sink writes it to the column payload.
func Envelope(id string, payload []byte) []byte {
	value, err := json.Marshal(struct {
		Schema  json.RawMessage `json:"schema"`
		Payload row             `json:"payload"`
	}{json.RawMessage(schema), row{id, string(payload)}})
	if err != nil {
		panic(err) // strings and a constant
	}
	return value
}

type row struct {
	ID      string `json:"id"`
	Payload string `json:"payload"`
}
