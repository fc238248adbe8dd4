package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// A mutant that the source has moved away from would only be found out when they
// are hunted.
func TestMutantsStillFit(t *testing.T) {
	for _, m := range mutants {
		for _, e := range m.edits {
			text, err := os.ReadFile(filepath.Join("../..", e.file))
			if err != nil {
				t.Error(err)
			} else if n := strings.Count(string(text), e.old); n != 1 {
				t.Errorf("%s: %s has this %d times: %s", m.name, e.file, n, e.old)
			}
		}
	}
}

// CONTRIBUTING lists breaks for people to try. Each names a file, what stands in it, and
// packages whose tests fail.
func TestBreaksStillFit(t *testing.T) {
	text, err := os.ReadFile("../../CONTRIBUTING.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := regexp.MustCompile(`(?m)^\| ((?:in|the same).+) \| .go test (.+). \|$`).FindAllStringSubmatch(string(text), -1)
	if len(rows) < 80 {
		t.Fatalf("there are only %d breaks", len(rows))
	}
	const schema = "dedup/schema/migrations/0001_initial.sql"
	code := regexp.MustCompile("`([^`]+)`")
	var file string
	for _, row := range rows {
		var source []byte
		read := func(name string) {
			text, err := os.ReadFile(filepath.Join("../..", name))
			if err != nil {
				t.Errorf("%s: %v", row[0], err)
			}
			source = append(source, text...)
		}
		if strings.HasPrefix(row[1], "the same") {
			read(file)
		}
		for _, m := range code.FindAllStringSubmatch(row[1], -1) {
			switch name := m[1]; {
			case filepath.Ext(name) != ".go" && filepath.Ext(name) != ".sql":
			case name == filepath.Base(schema):
				file = schema
				read(file)
			case strings.Contains(name, "/"):
				file = name
				read(file)
			default: // beside the one named before
				read(filepath.Join(filepath.Dir(file), name))
			}
		}
		for _, m := range code.FindAllStringSubmatch(row[1], -1) {
			if ext := filepath.Ext(m[1]); ext == ".go" || ext == ".sql" {
				continue
			}
			name := strings.TrimSuffix(m[1][strings.LastIndex(m[1], ".")+1:], "()")
			if !bytes.Contains(source, []byte(name)) {
				t.Errorf("%s: there is no %s", row[0], name)
			}
		}
		if !hasTest(t, strings.ReplaceAll(row[2], `\|`, "|")) {
			t.Errorf("%s: there is no such test", row[0])
		}
	}
}

// hasTest reports whether arguments of go test name a test that there is.
func hasTest(t *testing.T, args string) bool {
	args, run, _ := strings.Cut(args, " -run ")
	name := regexp.MustCompile(strings.Trim(run, "'"))
	for pattern := range strings.FieldsSeq(args) {
		folder, deep := strings.CutSuffix(pattern, "/...")
		folders := []string{folder}
		if deep {
			folders = append(folders, folder+"/*")
		}
		for _, f := range folders {
			files, err := filepath.Glob(filepath.Join("../..", f, "*_test.go"))
			if err != nil {
				t.Fatal(err)
			}
			for _, file := range files {
				text, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				for _, test := range regexp.MustCompile(`(?m)^func (Test\w+)\(`).FindAllSubmatch(text, -1) {
					if name.Match(test[1]) {
						return true
					}
				}
			}
		}
	}
	return false
}
