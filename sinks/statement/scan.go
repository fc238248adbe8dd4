package statement

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// token is a part of an SQL text.
type token struct {
	kind  tokenKind
	text  string // a word in lower case, a quoted name without its quotes
	start int    // byte offsets in the text
	end   int
}

type tokenKind int

const (
	space     tokenKind = iota // or a comment
	word                       // a keyword or a name
	quotedOne                  // a name in double quotes
	parameter                  // $1
	semicolon
	other
)

// scan splits an SQL text into tokens as Postgres' own lexer does with its standard
// settings, as far as it takes to tell names from strings and comments.
func scan(sql string) ([]token, error) {
	var tokens []token
	for i := 0; i < len(sql); {
		t, unended := next(sql, i)
		if unended != "" {
			return nil, errors.New(unended + " doesn't end")
		}
		if t.kind != space {
			tokens = append(tokens, t)
		}
		i = t.end
	}
	return tokens, nil
}

// next reads the token at i. unended names one that doesn't end.
func next(sql string, i int) (t token, unended string) {
	t = token{kind: other, start: i, end: i + 1}
	switch c := sql[i]; {
	case c == ' ' || c >= '\t' && c <= '\r':
		t.kind = space
	case strings.HasPrefix(sql[i:], "--"):
		t.kind, t.end = space, len(sql)
		if n := strings.IndexAny(sql[i:], "\r\n"); n >= 0 {
			t.end = i + n
		}
	case strings.HasPrefix(sql[i:], "/*"):
		t.kind, t.end, unended = space, blockComment(sql, i), "a comment /*"
	case c == '\'':
		t.end, unended = quotedEnd(sql, i, '\'', false), "a string"
	case (c == 'e' || c == 'E') && strings.HasPrefix(sql[i+1:], "'"):
		t.end, unended = quotedEnd(sql, i+1, '\'', true), "a string"
	case c == '"':
		t.kind, t.end, unended = quotedOne, quotedEnd(sql, i, '"', false), "a quoted name"
		if t.end > 0 {
			t.text = strings.ReplaceAll(sql[i+1:t.end-1], `""`, `"`)
		}
	case c == '$':
		t.end, t.kind = dollar(sql, i)
		unended = "a dollar-quoted string"
		if t.end > 0 {
			t.text = sql[i:t.end]
		}
	case nameStart(c):
		for t.end < len(sql) && (nameStart(sql[t.end]) || digit(sql[t.end]) || sql[t.end] == '$') {
			t.end++
		}
		t.kind, t.text = word, strings.ToLower(sql[i:t.end])
	case c == ';':
		t.kind, t.text = semicolon, ";"
	case digit(c):
		// A number swallows the letters after it, so that 1e5 is no name.
		for t.end < len(sql) && (nameStart(sql[t.end]) || digit(sql[t.end]) || sql[t.end] == '.') {
			t.end++
		}
	}
	if t.end > 0 {
		unended = ""
	}
	return t, unended
}

func digit(c byte) bool { return c >= '0' && c <= '9' }

func nameStart(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '_' || c >= 0x80
}

// blockComment returns the end of the comment at i, which may contain others; -1: it doesn't
// end.
func blockComment(sql string, i int) int {
	for depth := 0; i < len(sql); {
		switch {
		case strings.HasPrefix(sql[i:], "/*"):
			depth++
			i += 2
		case strings.HasPrefix(sql[i:], "*/"):
			depth--
			i += 2
			if depth == 0 {
				return i
			}
		default:
			i++
		}
	}
	return -1
}

// quotedEnd returns the end of what is quoted at i, where a doubled quote is a part of it;
// -1: it doesn't end.
func quotedEnd(sql string, i int, quote byte, backslash bool) int {
	for i++; i < len(sql); i++ {
		switch {
		case backslash && sql[i] == '\\':
			i++
		case sql[i] != quote:
		case i+1 < len(sql) && sql[i+1] == quote:
			i++
		default:
			return i + 1
		}
	}
	return -1
}

// dollar reads a parameter or a dollar-quoted string at i; -1: it doesn't end.
func dollar(sql string, i int) (end int, kind tokenKind) {
	end = i + 1
	if end < len(sql) && digit(sql[end]) {
		for end < len(sql) && digit(sql[end]) {
			end++
		}
		return end, parameter
	}
	for end < len(sql) && (nameStart(sql[end]) || end > i+1 && digit(sql[end])) {
		end++
	}
	if end == len(sql) || sql[end] != '$' {
		return i + 1, other // a lone $: the server will say what it thinks of it
	}
	tag := sql[i : end+1]
	after := strings.Index(sql[end+1:], tag)
	if after < 0 {
		return -1, other
	}
	return end + 1 + after + len(tag), other
}

var (
	// starters begin the statements that can have a WITH in front of them.
	starters = []string{"select", "insert", "update", "delete", "merge", "with", "values", "table"}
	// control begin the statements that would end or change dedupd's transaction.
	control = []string{"begin", "start", "commit", "end", "rollback", "abort", "savepoint", "release", "prepare", "set", "reset", "discard"}
)

// parsed is the operator's statement, split where batch goes in.
type parsed struct {
	recursive bool
	// ctes are the operator's own, if it begins with WITH.
	ctes string
	// main is what comes after them.
	main string
}

// parse checks what needs no server. The error joins all faults.
func parse(sql string) (parsed, error) {
	tokens, err := scan(sql)
	if err != nil {
		return parsed{}, err
	}
	for len(tokens) > 0 && tokens[len(tokens)-1].kind == semicolon {
		sql = sql[:tokens[len(tokens)-1].start]
		tokens = tokens[:len(tokens)-1]
	}
	if len(tokens) == 0 {
		return parsed{}, errors.New("there is no statement")
	}
	var errs []error
	first := tokens[0]
	if first.kind == other && sql[first.start] == '(' {
		first = token{kind: word, text: "select"}
	}
	switch {
	case first.kind == word && slices.Contains(control, first.text):
		errs = append(errs, fmt.Errorf("%s is not for a sink: the transaction belongs to dedupd, which commits the claims in it", strings.ToUpper(first.text)))
	case first.kind != word || !slices.Contains(starters, first.text):
		errs = append(errs, fmt.Errorf("it begins with %q; it must be one SELECT, INSERT, UPDATE, DELETE or MERGE, with or without a WITH", first.text))
	}
	mentioned := false
	for i, t := range tokens {
		switch {
		case t.kind == semicolon:
			errs = append(errs, errors.New("there is more than one statement; several can be parts of one: WITH a AS (INSERT ... RETURNING ...) UPDATE ..."))
			return parsed{}, errors.Join(errs...)
		case t.kind == parameter:
			errs = append(errs, fmt.Errorf("%s: parameters are dedupd's; a column of batch with const:TEXT gives a constant", t.text))
		case (t.kind == word || t.kind == quotedOne) && t.text == "batch" && i > 0:
			mentioned = true
		}
	}
	if !mentioned {
		errs = append(errs, errors.New("it doesn't mention batch, the relation that holds the messages: ... FROM batch ORDER BY ord"))
	}
	if len(errs) > 0 {
		return parsed{}, errors.Join(errs...)
	}
	p := parsed{main: sql}
	if first.kind == word && first.text == "with" {
		after := first.end
		if len(tokens) > 1 && tokens[1].kind == word && tokens[1].text == "recursive" {
			p.recursive, after = true, tokens[1].end
		}
		main := mainStart(sql, tokens)
		p.ctes, p.main = sql[after:main], sql[main:]
	}
	return p, nil
}

// mainStart is where the statement begins that follows the common table expressions: at the
// first word outside parentheses that begins one and is no expression's name.
func mainStart(sql string, tokens []token) int {
	depth := 0
	for i, t := range tokens[1:] {
		before := tokens[i]
		switch {
		case t.kind == other && (sql[t.start] == '(' || sql[t.start] == ')'):
			if depth == 0 && before.kind == other && sql[before.start] == ')' {
				return t.start // a SELECT in parentheses
			}
			if depth++; sql[t.start] == ')' {
				depth -= 2
			}
		case depth > 0 || t.kind != word || !slices.Contains(starters, t.text):
		case before.kind == other && sql[before.start] == ',', before.kind == word && (before.text == "with" || before.text == "recursive"):
			// WITH update AS (...), insert AS (...)
		default:
			return t.start
		}
	}
	return len(sql)
}

// join puts the definition of batch in front.
func (p parsed) join(batch string) string { return p.with(batch) + "\n" + p.main }

// with are the common table expressions, that of batch first.
func (p parsed) with(batch string) string {
	with := "WITH "
	if p.recursive {
		with = "WITH RECURSIVE "
	}
	if p.ctes != "" {
		return with + batch + "," + p.ctes
	}
	return with + batch
}

// checked is a statement that the server refuses unless p's returns a column ord of an
// integer type.
func (p parsed) checked(batch string) string {
	return p.with(batch) + ", dedupd_returned AS MATERIALIZED (\n" + p.main + "\n) SELECT r." + ordinal + " OPERATOR(pg_catalog.&) 0::pg_catalog.int8 FROM dedupd_returned AS r"
}
