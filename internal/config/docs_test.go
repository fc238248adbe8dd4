package config_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	_ "github.com/dedupd/dedupd/examples/customsink/balance"
	"github.com/dedupd/dedupd/internal/config"
	"github.com/dedupd/dedupd/sinks"
	_ "github.com/dedupd/dedupd/sinks/statement"
	_ "github.com/dedupd/dedupd/sinks/table"
)

const root = "../.."

// files returns the repository's files with that ending, by path, without what was
// built or downloaded.
func files(t *testing.T, ending string) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name := d.Name(); path != root && (strings.HasPrefix(name, ".") || name == "dist" || name == "testdata") {
				return filepath.SkipDir
			}
			return nil
		}
		if strings.HasSuffix(path, ending) {
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			all[path] = string(text)
		}
		return nil
	})
	if err != nil || len(all) == 0 {
		t.Fatalf("no files *%s: %v", ending, err)
	}
	return all
}

var fence = regexp.MustCompile("(?ms)^```(\\w*)\n(.*?)^```$")

// blocks are the fenced blocks of one language, by place.
func blocks(t *testing.T, language string) map[string]string {
	t.Helper()
	found := map[string]string{}
	for path, text := range files(t, ".md") {
		for _, m := range fence.FindAllStringSubmatchIndex(text, -1) {
			if text[m[2]:m[3]] == language {
				found[fmt.Sprintf("%s:%d", path, 1+strings.Count(text[:m[0]], "\n"))] = text[m[4]:m[5]]
			}
		}
	}
	if len(found) == 0 {
		t.Fatalf("no block of %s in any document", language)
	}
	return found
}

func TestConfigurationsInDocumentsAreValid(t *testing.T) {
	all := blocks(t, "yaml")
	for path, text := range files(t, ".yaml") {
		if strings.HasPrefix(path, filepath.Join(root, "examples")) {
			all[path] = text
		}
	}
	for name, text := range all {
		if _, warnings, err := config.Parse(name, []byte(text), config.Options{Sinks: &sinks.Default}); err != nil || len(warnings) > 0 {
			t.Errorf("%v %v", err, warnings)
		}
	}
}

// Go code in a document is part of a program that compiles and is tested.
func TestGoInDocumentsIsThatOfTheExamples(t *testing.T) {
	var examples []string
	for path, text := range files(t, ".go") {
		if strings.HasPrefix(path, filepath.Join(root, "examples")) {
			examples = append(examples, text)
		}
	}
	for name, text := range blocks(t, "go") {
		if !slices.ContainsFunc(examples, func(e string) bool { return strings.Contains(e, text) }) {
			t.Errorf("%s: this code stands in no file under examples/", name)
		}
	}
}

func TestMetricsInDocumentsAreThoseOfTheCode(t *testing.T) {
	registered := regexp.MustCompile(`(?:\bName:\s+|\b(?:gauge|counter|histogram)\()"(dedupd_[a-z0-9_]+)"`)
	var have []string
	for path, text := range files(t, ".go") {
		// Elsewhere the names are those of prepared statements.
		if filepath.Base(path) != "metrics.go" && filepath.Dir(path) != filepath.Join(root, "internal", "app") {
			continue
		}
		for _, m := range registered.FindAllStringSubmatch(text, -1) {
			have = append(have, m[1])
		}
	}
	row := regexp.MustCompile("(?m)^\\| `(dedupd_[a-z0-9_]+)`")
	var told []string
	text, err := os.ReadFile(filepath.Join(root, "docs", "operations.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range row.FindAllStringSubmatch(string(text), -1) {
		told = append(told, m[1])
	}
	slices.Sort(have)
	slices.Sort(told)
	if diff := cmp.Diff(have, told); diff != "" || len(have) < 20 {
		t.Errorf("metrics of the code (-) and of docs/operations.md (+):\n%s", diff)
	}
	// Metrics that are named elsewhere must exist, too.
	named := regexp.MustCompile("`(dedupd_[a-z0-9_]+)`")
	for path, text := range files(t, ".md") {
		for _, m := range named.FindAllStringSubmatch(text, -1) {
			if !slices.Contains(have, m[1]) && m[1] != "dedupd_" {
				t.Errorf("%s: there is no metric %s", path, m[1])
			}
		}
	}
}

// A command that documents give finds at least one test.
func TestTestsInDocumentsAreThere(t *testing.T) {
	declared := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	tests := map[string][]string{} // by folder, such as ./dedup
	for path, text := range files(t, "_test.go") {
		folder := "./" + filepath.ToSlash(filepath.Dir(strings.TrimPrefix(path, root+"/")))
		for _, m := range declared.FindAllStringSubmatch(text, -1) {
			tests[folder] = append(tests[folder], m[1])
		}
	}
	command := regexp.MustCompile("`go test ((?:\\./\\S+ )+)-run '?([^'`]+)'?`")
	for path, text := range files(t, ".md") {
		for _, m := range command.FindAllStringSubmatch(text, -1) {
			name := regexp.MustCompile(strings.ReplaceAll(m[2], `\|`, "|"))
			for folder := range strings.FieldsSeq(m[1]) {
				below, all := strings.CutSuffix(folder, "/...")
				var found bool
				for at, names := range tests {
					if at == folder || all && strings.HasPrefix(at+"/", below+"/") {
						found = found || slices.ContainsFunc(names, name.MatchString)
					}
				}
				if !found {
					t.Errorf("%s: no test of %s has a name like %s", path, folder, m[2])
				}
			}
		}
	}
}

func TestLinksInDocumentsResolve(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)\s]+)\)`)
	for path, text := range files(t, ".md") {
		text = fence.ReplaceAllString(text, "")
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			file, anchor, _ := strings.Cut(m[1], "#")
			target, body := path, text
			if file != "" {
				target = filepath.Join(filepath.Dir(path), file)
				content, err := os.ReadFile(target)
				if info, statErr := os.Stat(target); statErr != nil || err != nil && !info.IsDir() {
					t.Errorf("%s: nothing at %s", path, m[1])
					continue
				}
				body = string(content)
			}
			if anchor != "" && !slices.Contains(anchors(body), anchor) {
				t.Errorf("%s: %s has no heading for #%s", path, target, anchor)
			}
		}
	}
}

// anchors are those of a document's headings.
func anchors(text string) (all []string) {
	heading := regexp.MustCompile(`(?m)^#+ (.*)$`)
	drop := regexp.MustCompile(`[^\p{L}\p{N} _-]`)
	for _, m := range heading.FindAllStringSubmatch(text, -1) {
		all = append(all, strings.ReplaceAll(drop.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-"))
	}
	return all
}

// The documents say what every dependency of go.mod is for.
func TestDependenciesAreTold(t *testing.T) {
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	told, err := os.ReadFile(filepath.Join(root, "docs", "decisions", "dependencies.md"))
	if err != nil {
		t.Fatal(err)
	}
	direct := regexp.MustCompile(`(?m)^\t(\S+) v\S+$`)
	for _, m := range direct.FindAllStringSubmatch(string(mod), -1) {
		if name := strings.TrimPrefix(m[1], "github.com/twmb/franz-go/"); !strings.Contains(string(told), name) {
			t.Errorf("docs/decisions/dependencies.md doesn't tell why there is %s", m[1])
		}
	}
}

// The files in the table of docs/ARCHITECTURE.md exist.
func TestFilesOfTheArchitectureAreThere(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "docs", "ARCHITECTURE.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, table, ok := strings.Cut(string(text), "\n## Files\n")
	name := regexp.MustCompile("`([^` ]+)`")
	var folders []string
	named := 0
	for line := range strings.Lines(table) {
		cells := strings.Split(line, "|")
		if len(cells) != 5 {
			continue
		}
		if found := name.FindAllStringSubmatch(cells[1], -1); len(found) > 0 {
			folders = nil
			for _, m := range found {
				folders = append(folders, m[1])
			}
		}
		for _, folder := range folders {
			if _, err := os.Stat(filepath.Join(root, folder)); err != nil {
				t.Errorf("the table of files: %v", err)
			}
			for _, m := range name.FindAllStringSubmatch(cells[2], -1) {
				named++
				if _, err := os.Stat(filepath.Join(root, folder, m[1])); err != nil {
					t.Errorf("the table of files: %v", err)
				}
			}
		}
	}
	if !ok || named < 50 {
		t.Errorf("%d files are named", named)
	}
}
