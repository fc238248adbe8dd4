package connect

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
)

// batch is the number of messages that a task takes and writes at a time.
const batch = "3000"

func (o *Options) worker(rest string) properties {
	return properties{
		"bootstrap.servers":              o.Brokers,
		"listeners":                      "HTTP://" + rest,
		"plugin.path":                    o.Plugin,
		"plugin.discovery":               "service_load",
		"offset.storage.file.filename":   o.file("offsets"),
		"key.converter":                  "org.apache.kafka.connect.storage.StringConverter",
		"value.converter":                "org.apache.kafka.connect.json.JsonConverter",
		"value.converter.schemas.enable": "true",
	}
}

// connector is the fastest configuration that leaves each id once: an upsert
// by the id. One statement must not have an id twice, which the reduction buffer
// sees to. Debezium's inserts by UNNEST, dialect.postgres.unnest.insert.enabled,
// were as fast as the rewritten ones, and cost as much.
func (o *Options) connector() properties {
	return properties{
		"name":            o.Group,
		"connector.class": "io.debezium.connector.jdbc.JdbcSinkConnector",
		"tasks.max":       strconv.Itoa(o.Tasks),
		"topics":          o.Topic,

		"consumer.override.group.id":          o.Group,
		"consumer.override.auto.offset.reset": "earliest",
		"consumer.override.max.poll.records":  batch,

		"connection.url":           fmt.Sprintf("jdbc:postgresql://%s:%d/%s?reWriteBatchedInserts=true", o.PostgresHost, o.Port, o.Database),
		"connection.username":      o.User,
		"connection.password":      o.Password,
		"connection.pool.min_size": "1", // of each task, which needs no more

		"collection.name.format": o.Table,
		"schema.evolution":       "none",
		"insert.mode":            "upsert",
		"primary.key.mode":       "record_value",
		"primary.key.fields":     "id",
		"batch.size":             batch,
		"use.reduction.buffer":   "true",
	}
}

// properties are a file in Java's format.
type properties map[string]string

func (p properties) String() string {
	var b strings.Builder
	for _, key := range slices.Sorted(maps.Keys(p)) {
		b.WriteString(key + "=")
		for _, c := range utf16.Encode([]rune(p[key])) {
			if c > ' ' && c < 0x7f && c != '\\' {
				b.WriteByte(byte(c))
			} else {
				fmt.Fprintf(&b, `\u%04x`, c)
			}
		}
		b.WriteByte('\n')
	}
	return b.String()
}
