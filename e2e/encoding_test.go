package e2e

import (
	"fmt"
	"net/url"
	"strings"
	"testing"
)

// A database that isn't UTF8 would hold other text than the messages have.
func TestEncodings(t *testing.T) {
	db := newDatabase(t)
	st := newStream(t, "ENCODINGS")
	st.publish("1", []byte(`{"n": 1, "word": "größe €"}`))
	config := func(scope, url string) string {
		return configFile(t, fmt.Sprintf("scope: %s\nsources:\n  - nats: {servers: [%q], stream: ENCODINGS, durable: %s}\ndatabase:\n  url: %q\n%s",
			scope, st.url, scope, url, ordersSink))
	}
	for _, encoding := range []string{"LATIN1", "SQL_ASCII"} {
		name := "e2e_" + strings.ToLower(encoding)
		db.exec(`CREATE DATABASE ` + name + ` TEMPLATE template0 LOCALE 'C' ENCODING '` + encoding + `'`)
		u, err := url.Parse(db.url)
		if err != nil {
			t.Fatal(err)
		}
		u.Path = "/" + name
		file := config("e2e-"+strings.ToLower(strings.ReplaceAll(encoding, "_", "-")), u.String())
		for _, args := range [][]string{{"run", "--until-idle", "1s"}, {"migrate", "up"}, {"doctor"}} {
			r := command(t, nil, append(args, "-c", file)...)
			if out := r.stdout + r.stderr; r.code != 3 || !strings.Contains(out, "encoding is "+encoding) || !strings.Contains(out, "ENCODING 'UTF8'") {
				t.Errorf("%s, %v: exit code %d\n%s", encoding, args, r.code, out)
			} else if strings.Contains(out, "schema") {
				t.Errorf("%s, %v: it asks for more than another database\n%s", encoding, args, out)
			}
		}
		db.exec(`DROP DATABASE ` + name + ` WITH (FORCE)`)
	}

	// What a database's settings take a client's encoding for changes nothing.
	db.exec(`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET client_encoding = ''LATIN1''', current_database()); END $$`)
	db.exec(ordersTable)
	if r := command(t, nil, "run", "-c", config("e2e-encodings", db.url), "--until-idle", "1s"); r.code != 0 {
		t.Fatal(r.stderr)
	}
	var letters int
	if err := db.pool.QueryRow(t.Context(), `SELECT length(payload->>'word') FROM public.orders`).Scan(&letters); err != nil || letters != 7 {
		t.Errorf("the word has %d letters, %v", letters, err)
	}
}
