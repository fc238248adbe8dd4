package config

import (
	"fmt"
	"strings"
)

// maxSecret is larger than any password or DSN.
const maxSecret = 64 << 10

// Connection returns the database's URL. It reads a file again each time, because
// secrets change while the program runs: call it at each connect.
func (d *Database) Connection() (string, error) { return current(d.URL, d.URLFile) }

// CurrentPassword returns the password. It reads a file again each time: call it at
// each connect.
func (s *SASL) CurrentPassword() (string, error) { return current(s.Password, s.PasswordFile) }

func current(value Secret, file string) (string, error) {
	if file == "" {
		return value.Reveal(), nil
	}
	text, err := read(file, maxSecret)
	if err != nil {
		return "", fmt.Errorf("read a secret: %w", err)
	}
	// Editors and echo end a file with a line break, which isn't part of the secret.
	secret := strings.TrimRight(string(text), "\r\n")
	if secret == "" {
		return "", fmt.Errorf("read a secret: %s is empty", file)
	}
	return secret, nil
}

// readSecrets reads the secrets that are in files, as they are now.
func (c *Config) readSecrets() (problems Problems) {
	fill := func(path string, value *Secret, file string) {
		if file == "" {
			return
		}
		if *value != "" {
			problems = append(problems, c.problem(path+"_file", "excludes %s; keep one of the two", path))
			return
		}
		text, err := current("", file)
		if err != nil {
			problems = append(problems, c.problem(path+"_file", "%v", err))
			return
		}
		*value = Secret(text)
		p := c.places[path+"_file"]
		p.origin = "file " + file
		c.places[path] = p
	}
	fill("database.url", &c.Database.URL, c.Database.URLFile)
	for i := range c.Sources {
		if k := c.Sources[i].Kafka; k != nil {
			fill(index("sources", i)+".kafka.sasl.password", &k.SASL.Password, k.SASL.PasswordFile)
		}
	}
	return problems
}
