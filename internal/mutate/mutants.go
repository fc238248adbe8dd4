package main

import (
	"fmt"
	"go/ast"
	"go/token"
	"go/types"
	"maps"
	"slices"
	"strings"
)

// mutant is one change.
type mutant struct {
	id    int
	file  string
	line  int
	where string // file:line
	what  string // for people
	// from and to are the bytes of what is changed; write gives the new text, in
	// which both ways stand, the number deciding. text renders a part of the old.
	from, to int
	write    func(text func(ast.Node) string, inner string) string
}

// collector gathers the changes of one file.
type collector struct {
	p       *pkg
	file    string
	mutants []*mutant
	results []*types.Tuple // of the functions we are in
}

// mutants finds all changes, of the files that are named, if any are.
func (p *pkg) mutants(only []string) ([]*mutant, error) {
	var all []*mutant
	for _, name := range slices.Sorted(maps.Keys(p.files)) {
		if len(only) > 0 && !slices.Contains(only, name) {
			continue
		}
		c := &collector{p: p, file: name}
		for _, d := range p.files[name].Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Body != nil {
				c.function(f.Body, p.info.Defs[f.Name].Type().(*types.Signature))
			}
		}
		all = append(all, c.mutants...)
	}
	for i, m := range all {
		m.id = i + 1
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("there is nothing to change")
	}
	return all, nil
}

func (c *collector) offset(p token.Pos) int { return c.p.fset.Position(p).Offset }

// source is a node as it stands there, in one line.
func (c *collector) source(n ast.Node) string {
	text := strings.Join(strings.Fields(string(c.p.texts[c.file][c.offset(n.Pos()):c.offset(n.End())])), " ")
	const most = 70
	if r := []rune(text); len(r) > most {
		return string(r[:most]) + "…"
	}
	return text
}

// add has a node rewritten. The format's %s are the switch's number and the node.
func (c *collector) add(n ast.Node, what string, write func(id string, text func(ast.Node) string, inner string) string) {
	m := &mutant{file: c.file, line: c.p.fset.Position(n.Pos()).Line, what: what, from: c.offset(n.Pos()), to: c.offset(n.End())}
	m.where = fmt.Sprintf("%s:%d", c.p.fset.Position(n.Pos()).Filename, m.line)
	m.write = func(text func(ast.Node) string, inner string) string { return write(fmt.Sprint(m.id), text, inner) }
	c.mutants = append(c.mutants, m)
}

// around is the usual way to rewrite: something before, something behind.
func around(before, behind string) func(string, func(ast.Node) string, string) string {
	return func(id string, _ func(ast.Node) string, inner string) string {
		return fmt.Sprintf(before, id) + inner + behind
	}
}

func (c *collector) function(body *ast.BlockStmt, s *types.Signature) {
	c.results = append(c.results, s.Results())
	ast.Inspect(body, c.visit)
	c.results = c.results[:len(c.results)-1]
}

func (c *collector) visit(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.FuncLit:
		c.function(n.Body, c.p.info.Types[n].Type.(*types.Signature))
		return false
	case *ast.BinaryExpr:
		c.binary(n)
	case *ast.ReturnStmt:
		c.returned(n)
	case *ast.BlockStmt:
		c.statements(n.List)
	case *ast.CaseClause:
		c.statements(n.Body)
	case *ast.CommClause:
		c.statements(n.Body)
	case *ast.IfStmt:
		c.condition(n.Cond)
	case *ast.ForStmt:
		if n.Cond != nil {
			c.condition(n.Cond)
		}
	case *ast.GenDecl: // constants can't be switched
		return n.Tok != token.CONST
	}
	return true
}

func (c *collector) isConstant(e ast.Expr) bool { return c.p.info.Types[e].Value != nil }

// is reports whether an expression is of just the type bool, or of an integer type.
func (c *collector) is(e ast.Expr, flag types.BasicInfo) bool {
	t := c.p.info.Types[e].Type
	if t == nil {
		return false
	}
	if b, ok := t.Underlying().(*types.Basic); ok {
		return b.Info()&flag != 0 && (flag != types.IsBoolean || types.Identical(types.Default(t), types.Typ[types.Bool]))
	}
	return false
}

func (c *collector) condition(e ast.Expr) {
	if c.is(e, types.IsBoolean) && !c.isConstant(e) {
		c.add(e, "negated: "+c.source(e), around("(mutant__(%s) != (", "))"))
	}
}

// boundaries are comparisons and their neighbours.
var boundaries = map[token.Token]token.Token{token.LSS: token.LEQ, token.LEQ: token.LSS, token.GTR: token.GEQ, token.GEQ: token.GTR}

func (c *collector) binary(n *ast.BinaryExpr) {
	if c.isConstant(n) {
		return
	}
	switch n.Op {
	case token.LAND, token.LOR:
		c.condition(n.X)
		c.condition(n.Y)
	case token.LSS, token.LEQ, token.GTR, token.GEQ:
		other := boundaries[n.Op]
		c.add(n, fmt.Sprintf("%s instead of %s: %s", other, n.Op, c.source(n)), func(id string, text func(ast.Node) string, _ string) string {
			x, y := text(n.X), text(n.Y)
			return fmt.Sprintf("(mutant__(%s) && (%s %s %s) || !mutant__(%[1]s) && (%[2]s %[5]s %[4]s))", id, x, other, y, n.Op)
		})
	case token.ADD, token.SUB:
		if c.is(n, types.IsInteger) {
			c.add(n, "one more: "+c.source(n), around("oneMore__(%s, ", ")"))
			c.add(n, "one less: "+c.source(n), around("oneLess__(%s, ", ")"))
		}
	}
}

// returned swaps booleans, and errors for none.
func (c *collector) returned(n *ast.ReturnStmt) {
	results := c.results[len(c.results)-1]
	if len(n.Results) != results.Len() {
		return
	}
	for i, e := range n.Results {
		switch t := results.At(i).Type(); {
		case types.Identical(t, types.Typ[types.Bool]):
			c.add(e, "the other truth: return … "+c.source(e), around("mutant__(%s) != (", ")"))
		case !types.Identical(t, types.Universe.Lookup("error").Type()):
		case c.p.info.Types[e].IsNil():
			c.add(e, "an error instead of nil: "+c.source(n), around("anError__(%s, ", ")"))
		default:
			c.add(e, "nil instead of an error: "+c.source(n), around("noError__(%s, ", ")"))
		}
	}
}

// statements drops one after the other, where it compiles without.
func (c *collector) statements(list []ast.Stmt) {
	for i, s := range list {
		switch s := s.(type) {
		case *ast.ExprStmt:
			if call, ok := s.X.(*ast.CallExpr); ok && i == len(list)-1 && c.isPanic(call) {
				continue // what ends a function can't be made conditional
			}
		case *ast.AssignStmt:
			if s.Tok == token.DEFINE {
				continue
			}
		case *ast.BranchStmt:
			if s.Tok != token.BREAK && s.Tok != token.CONTINUE {
				continue
			}
		case *ast.IncDecStmt, *ast.SendStmt, *ast.DeferStmt, *ast.GoStmt:
		default:
			continue
		}
		c.add(s, "left out: "+c.source(s), around("if !mutant__(%s) { ", " }"))
	}
}

func (c *collector) isPanic(call *ast.CallExpr) bool {
	f, ok := call.Fun.(*ast.Ident)
	return ok && f.Name == "panic"
}
