package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
)

// pkg is a package that has tests, with its types.
type pkg struct {
	Dir, ImportPath, Name, Export string
	GoFiles, CgoFiles             []string
	TestGoFiles, XTestGoFiles     []string
	DepOnly                       bool

	fset  *token.FileSet
	files map[string]*ast.File // by name
	texts map[string][]byte
	info  *types.Info
}

// load reads the packages of a pattern. What they import comes as the compiler has
// left it.
func load(ctx context.Context, pattern string) ([]*pkg, error) {
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, "go", "list", "-deps", "-export", "-json=Dir,ImportPath,Name,Export,GoFiles,CgoFiles,TestGoFiles,XTestGoFiles,DepOnly", pattern)
	cmd.Stderr = &stderr
	text, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list %s: %w\n%s", pattern, err, stderr.String())
	}
	exports := map[string]string{}
	var wanted []*pkg
	for d := json.NewDecoder(bytes.NewReader(text)); ; {
		p := &pkg{}
		if err := d.Decode(p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, err
		}
		exports[p.ImportPath] = p.Export
		if !p.DepOnly && len(p.TestGoFiles)+len(p.XTestGoFiles) > 0 && len(p.GoFiles) > 0 {
			wanted = append(wanted, p)
		}
	}
	for _, p := range wanted {
		if err := p.check(exports); err != nil {
			return nil, fmt.Errorf("%s: %w", p.ImportPath, err)
		}
	}
	return wanted, nil
}

// check parses the package and finds out its types.
func (p *pkg) check(exports map[string]string) error {
	p.fset, p.files, p.texts = token.NewFileSet(), map[string]*ast.File{}, map[string][]byte{}
	var all []*ast.File
	for _, name := range slices.Concat(p.GoFiles, p.CgoFiles) {
		text, err := os.ReadFile(filepath.Join(p.Dir, name))
		if err != nil {
			return err
		}
		f, err := parser.ParseFile(p.fset, filepath.Join(p.Dir, name), text, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		p.files[name], p.texts[name] = f, text
		all = append(all, f)
	}
	p.info = &types.Info{Types: map[ast.Expr]types.TypeAndValue{}, Defs: map[*ast.Ident]types.Object{}}
	config := types.Config{Importer: importer.ForCompiler(p.fset, "gc", func(path string) (io.ReadCloser, error) {
		if exports[path] == "" {
			return nil, fmt.Errorf("nothing is known of %s", path)
		}
		return os.Open(exports[path])
	})}
	_, err := config.Check(p.ImportPath, p.fset, all, p.info)
	return err
}
