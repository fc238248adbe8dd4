package e2e

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// comparedTexts are the functions that may decide something by the text of an error,
// and why.
var comparedTexts = map[string]string{
	"internal/pgtest/server.go StartServer": "the server's log is all that there is of a port that is taken; for tests only",
	"internal/pgtest/server.go Restart":     "the same",
	"internal/logonce/logonce.go IsNew":     "it decides only whether the log has that text already",
}

// Errors are told apart by type, by errors.Is and by code, never by their text: that
// changes with a server's language and a library's version. To log the same text once
// is no decision: a text may be compared with the one before, which it then replaces.
func TestErrorsAreNotMatchedByText(t *testing.T) {
	root, err := repository()
	if err != nil {
		t.Fatal(err)
	}
	files := 0
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, _ := filepath.Rel(root, path)
		name = filepath.ToSlash(name)
		// What is under e2e judges a finished run from outside, where there is only text.
		if d.IsDir() && (name == "e2e" || d.Name() == "testdata" || len(d.Name()) > 1 && strings.HasPrefix(d.Name(), ".")) {
			return filepath.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			return nil
		}
		files++
		src, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		found, err := textMatches(src)
		for _, f := range found {
			if comparedTexts[name+" "+f.function] != "" {
				continue
			}
			t.Errorf("%s:%d: %s compares the text of an error (%s): use errors.Is, errors.As or a code", name, f.line, f.function, f.how)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if files < 100 {
		t.Fatalf("only %d files were looked at", files)
	}
}

// The search itself finds what it is for.
func TestTextMatchesAreFound(t *testing.T) {
	for code, want := range map[string]string{
		`if strings.Contains(err.Error(), "x") {}`:                               "strings.Contains",
		`if strings.HasPrefix(strings.ToLower(fmt.Sprint(err.Error())), "x") {}`: "strings.HasPrefix",
		`if err.Error() == "x" {}`:                                               "==",
		`if "x" != err.Error() {}`:                                               "!=",
		`text := err.Error(); if text == "x" {}`:                                 "==",
		`text := strings.TrimSpace(err.Error()); _ = strings.Index(text, "x")`:   "strings.Index",
		`var text = err.Error(); if text == other {}`:                            "==",
		`text := ""; text = err.Error(); if text == other {}`:                    "==",
		`switch err.Error() { case "x": }`:                                       "switch",
		`switch text := err.Error(); text { case "x": }`:                         "switch",
		`if pattern.MatchString(err.Error()) {}`:                                 "MatchString",
		`if slices.Contains(list, err.Error()) {}`:                               "slices.Contains",
		`_ = known[err.Error()]`:                                                 "an index",
		`if _, after, ok := strings.Cut(err.Error(), "x"); ok { _ = after }`:     "strings.Cut",
		`if pg.Message == "x" {}`:                                                "==",
		`if strings.Contains(pg.Detail, "x") {}`:                                 "strings.Contains",
		`fmt.Println(err.Error())`:                                               "",
		`log.Warn("x", "error", err.Error())`:                                    "",
		`if err == io.EOF {}`:                                                    "",
		`if err := batch.Error(); err != nil {}`:                                 "",
		`if text := err.Error(); text != last { last = text; warn(err) }`:        "",
		`if err.Error() != x.last && quiet { x.last = err.Error() }`:             "",
		`switch { case err.Error() != told[topic]: told[topic] = err.Error() }`:  "",
		`if err.Error() != last { other = err.Error() }`:                         "!=",
		`if err.Error() == last { last = err.Error() }`:                          "==",
		`if len(err.Error()) > 100 {}`:                                           "",
	} {
		found, err := textMatches([]byte("package p\nfunc f() {\n" + code + "\n}"))
		if err != nil {
			t.Fatal(code, err)
		}
		how := ""
		if len(found) > 0 {
			how = found[0].how
		}
		if how != want {
			t.Errorf("%s: found %q, want %q", code, how, want)
		}
	}
}

// textMatch is a place where the text of an error decides something.
type textMatch struct {
	function string
	line     int
	how      string
}

func textMatches(src []byte) (found []textMatch, err error) {
	set := token.NewFileSet()
	file, err := parser.ParseFile(set, "", src, 0)
	if err != nil {
		return nil, err
	}
	for _, decl := range file.Decls {
		f, ok := decl.(*ast.FuncDecl)
		if !ok || f.Body == nil {
			continue
		}
		texts, once := errorTexts(f.Body), remembered(f.Body)
		ast.Inspect(f.Body, func(n ast.Node) bool {
			if how := decides(n, texts); how != "" && !once[n] {
				found = append(found, textMatch{f.Name.Name, set.Position(n.Pos()).Line, how})
			}
			return true
		})
	}
	return found, nil
}

// errorTexts are the variables of a function that are given the text of an error.
func errorTexts(body ast.Node) map[string]bool {
	texts := map[string]bool{}
	for before := -1; before != len(texts); { // until nothing is added: one may be made of another
		before = len(texts)
		ast.Inspect(body, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.AssignStmt:
				for i, left := range n.Lhs {
					right := n.Rhs[min(i, len(n.Rhs)-1)]
					if name, ok := left.(*ast.Ident); ok && name.Name != "_" && isErrorText(right, texts) {
						texts[name.Name] = true
					}
				}
			case *ast.ValueSpec:
				for i, name := range n.Names {
					if i < len(n.Values) && isErrorText(n.Values[i], texts) {
						texts[name.Name] = true
					}
				}
			}
			return true
		})
	}
	return texts
}

// remembered are the comparisons by which the same thing is said once: what isn't
// equal to the last is the last from then on.
func remembered(body ast.Node) map[ast.Node]bool {
	once := map[ast.Node]bool{}
	note := func(conditions []ast.Expr, then []ast.Stmt) {
		assigned := map[string]bool{}
		for _, s := range then {
			if a, ok := s.(*ast.AssignStmt); ok {
				for _, left := range a.Lhs {
					assigned[types.ExprString(left)] = true
				}
			}
		}
		for _, c := range conditions {
			ast.Inspect(c, func(n ast.Node) bool {
				if b, ok := n.(*ast.BinaryExpr); ok && b.Op == token.NEQ && (assigned[types.ExprString(b.X)] || assigned[types.ExprString(b.Y)]) {
					once[b] = true
				}
				return true
			})
		}
	}
	ast.Inspect(body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.IfStmt:
			note([]ast.Expr{n.Cond}, n.Body.List)
		case *ast.CaseClause:
			note(n.List, n.Body)
		}
		return true
	})
	return once
}

// isErrorText reports whether an expression is the text of an error, or made of one:
// a call of Error, a text that the database sent, or a string function of these.
func isErrorText(e ast.Expr, texts map[string]bool) bool {
	switch e := e.(type) {
	case *ast.Ident:
		return texts[e.Name]
	case *ast.ParenExpr:
		return isErrorText(e.X, texts)
	case *ast.BinaryExpr:
		return e.Op == token.ADD && (isErrorText(e.X, texts) || isErrorText(e.Y, texts))
	case *ast.SliceExpr:
		return isErrorText(e.X, texts)
	case *ast.SelectorExpr:
		name, ok := e.X.(*ast.Ident)
		return ok && (name.Name == "pg" || strings.HasSuffix(strings.ToLower(name.Name), "err")) && slices.Contains([]string{"Message", "Detail", "Hint", "Where"}, e.Sel.Name)
	case *ast.CallExpr:
		of, ok := e.Fun.(*ast.SelectorExpr)
		if !ok {
			return false
		}
		if of.Sel.Name == "Error" && len(e.Args) == 0 {
			return true
		}
		if p, ok := of.X.(*ast.Ident); !ok || p.Name != "strings" && p.Name != "fmt" {
			return false
		}
		return slices.ContainsFunc(e.Args, func(arg ast.Expr) bool { return isErrorText(arg, texts) })
	}
	return false
}

func isNil(e ast.Expr) bool {
	name, ok := e.(*ast.Ident)
	return ok && name.Name == "nil"
}

// decides tells how a node decides something by the text of an error; empty: it
// doesn't.
func decides(n ast.Node, texts map[string]bool) string {
	is := func(e ast.Expr) bool { return e != nil && isErrorText(e, texts) }
	switch n := n.(type) {
	case *ast.BinaryExpr:
		if (n.Op == token.EQL || n.Op == token.NEQ) && (is(n.X) || is(n.Y)) && !isNil(n.X) && !isNil(n.Y) {
			return n.Op.String()
		}
	case *ast.SwitchStmt:
		if is(n.Tag) {
			return "switch"
		}
	case *ast.IndexExpr:
		if is(n.Index) {
			return "an index"
		}
	case *ast.CallExpr:
		of, ok := n.Fun.(*ast.SelectorExpr)
		if !ok || !slices.ContainsFunc(n.Args, is) {
			return ""
		}
		for _, verb := range []string{"Contains", "HasPrefix", "HasSuffix", "Index", "LastIndex", "Equal", "EqualFold", "Compare", "Cut", "Count", "Match", "Find"} {
			if strings.HasPrefix(of.Sel.Name, verb) {
				if p, ok := of.X.(*ast.Ident); ok && (p.Name == "strings" || p.Name == "slices" || p.Name == "bytes" || p.Name == "regexp") {
					return fmt.Sprintf("%s.%s", p.Name, of.Sel.Name)
				}
				return of.Sel.Name
			}
		}
	}
	return ""
}
