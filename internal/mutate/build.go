package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"go/ast"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// switches is what the changed package is given: the switch, and what can't be said
// in place. Reached numbers are noted where the environment asks for it.
const switches = `package %s

import (
	"errors"
	"os"
	"strconv"
	"sync"
)

var activeMutant__, _ = strconv.Atoi(os.Getenv("MUTATE_ID"))

var reachedMutants__ = struct {
	sync.Mutex
	file *os.File
	all  map[int]bool
}{file: func() *os.File {
	f, _ := os.OpenFile(os.Getenv("MUTATE_REACHED"), os.O_APPEND|os.O_WRONLY, 0)
	return f
}(), all: map[int]bool{}}

func mutant__(id int) bool {
	if r := &reachedMutants__; r.file != nil {
		r.Lock()
		if !r.all[id] {
			r.all[id] = true
			_, _ = r.file.WriteString(strconv.Itoa(id) + "\n")
		}
		r.Unlock()
	}
	return id == activeMutant__
}

type integer__ interface {
	~int | ~int8 | ~int16 | ~int32 | ~int64 | ~uint | ~uint8 | ~uint16 | ~uint32 | ~uint64 | ~uintptr
}

func oneMore__[T integer__](id int, v T) T {
	if mutant__(id) {
		v++
	}
	return v
}

func oneLess__[T integer__](id int, v T) T {
	if mutant__(id) {
		v--
	}
	return v
}

func anError__(id int, err error) error {
	if mutant__(id) {
		return errors.New("made by mutate")
	}
	return err
}

func noError__(id int, err error) error {
	if mutant__(id) {
		return nil
	}
	return err
}
`

// built is a test binary with all changes in it.
type built struct {
	pkg     *pkg
	folder  string
	binary  string
	mutants []*mutant
}

// build compiles the tests with all changes. What the compiler refuses, such as a
// function whose end could then be reached, is taken out again.
func (p *pkg) build(ctx context.Context, folder string, mutants []*mutant) (*built, error) {
	b := &built{pkg: p, folder: folder, binary: filepath.Join(folder, "tests"), mutants: mutants}
	for range 20 {
		if err := b.write(); err != nil {
			return nil, err
		}
		cmd := exec.CommandContext(ctx, "go", "test", "-c", "-vet=off", "-gcflags="+p.ImportPath+"=-e", "-overlay", filepath.Join(folder, "overlay.json"), "-o", b.binary, p.ImportPath)
		said, err := cmd.CombinedOutput()
		if err == nil {
			return b, nil
		}
		if !b.drop(said) {
			return nil, fmt.Errorf("it doesn't compile: %w\n%s", err, said)
		}
	}
	return nil, fmt.Errorf("it doesn't compile, whatever is left out")
}

// write makes the changed files, and the overlay that has the compiler read them.
func (b *built) write() error {
	replace := map[string]string{filepath.Join(b.pkg.Dir, "zz_mutate.go"): filepath.Join(b.folder, "switches.go")}
	if err := os.WriteFile(filepath.Join(b.folder, "switches.go"), fmt.Appendf(nil, switches, b.pkg.Name), 0o600); err != nil {
		return err
	}
	for name, text := range b.pkg.texts {
		to := filepath.Join(b.folder, name)
		if err := os.WriteFile(to, []byte(b.render(name, text)), 0o600); err != nil {
			return err
		}
		replace[filepath.Join(b.pkg.Dir, name)] = to
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(b.folder, "overlay.json"), overlay, 0o600)
}

// render is a file with its changes. Lines stay where they are.
func (b *built) render(file string, text []byte) string {
	var mine []*mutant
	for _, m := range b.mutants {
		if m.file == file {
			mine = append(mine, m)
		}
	}
	// The outer one first; of those of the same text, the one that was found first:
	// a condition before what it compares.
	slices.SortStableFunc(mine, func(x, y *mutant) int {
		return cmp.Or(cmp.Compare(x.from, y.from), cmp.Compare(y.to, x.to), cmp.Compare(x.id, y.id))
	})
	offset := func(n ast.Node) (int, int) {
		return b.pkg.fset.Position(n.Pos()).Offset, b.pkg.fset.Position(n.End()).Offset
	}
	// part renders a range by the changes that lie within.
	var part func(from, to int, changes []*mutant) string
	part = func(from, to int, changes []*mutant) string {
		var out strings.Builder
		at := from
		for i := 0; i < len(changes); {
			m := changes[i]
			j := i + 1
			for j < len(changes) && changes[j].from < m.to {
				j++
			}
			inside := changes[i+1 : j]
			out.Write(text[at:m.from])
			out.WriteString(m.write(func(n ast.Node) string {
				x, y := offset(n)
				var within []*mutant
				for _, other := range inside {
					if other.from >= x && other.to <= y {
						within = append(within, other)
					}
				}
				return part(x, y, within)
			}, part(m.from, m.to, inside)))
			at, i = m.to, j
		}
		out.Write(text[at:to])
		return out.String()
	}
	return part(0, len(text), mine)
}

var complaint = regexp.MustCompile(`(?m)^(?:[^\s:]*/)?([^\s:/]+\.go):(\d+):\d+: `)

// drop takes out the changes in whose lines the compiler has found fault. A missing
// return is told of where the function ends: what ends it stands before.
func (b *built) drop(said []byte) bool {
	faults := map[string]bool{}
	for _, m := range complaint.FindAllSubmatch(said, -1) {
		faults[string(m[1])+":"+string(m[2])] = true
		if line, err := strconv.Atoi(string(m[2])); err == nil && bytes.Contains(said, []byte("missing return")) {
			faults[fmt.Sprintf("%s:%d", m[1], line-1)] = true
		}
	}
	before := len(b.mutants)
	b.mutants = slices.DeleteFunc(b.mutants, func(m *mutant) bool { return faults[fmt.Sprintf("%s:%d", m.file, m.line)] })
	return len(b.mutants) < before
}
