package config

import (
	"strings"

	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/token"
)

// standIn is a letter that no file has.
const standIn = '\ue000'

// tokens are a text's, with the keys of mappings in braces as YAML has them. goccy ends a
// key there at its first colon: of {json:type: [a]} it makes the key "json" and the text
// "type:" (its issue 832). YAML has the key "json:type": a colon separates only before a
// space. So such colons are letters while goccy reads the text.
func tokens(text []byte) token.Tokens {
	all := lexer.Tokenize(string(text))
	if strings.ContainsRune(string(text), standIn) {
		return all
	}
	var lines [][]rune
	for line := range strings.SplitSeq(string(text), "\n") {
		lines = append(lines, []rune(line))
	}
	const passes = 20 // one can bring others to light, but hardly so many
	for range passes {
		colons := colonsInKeys(all)
		if len(colons) == 0 {
			break
		}
		for _, p := range colons {
			if p.Line <= len(lines) && p.Column <= len(lines[p.Line-1]) && lines[p.Line-1][p.Column-1] == ':' {
				lines[p.Line-1][p.Column-1] = standIn
			}
		}
		var again strings.Builder
		for i, line := range lines {
			if i > 0 {
				again.WriteByte('\n')
			}
			again.WriteString(string(line))
		}
		all = lexer.Tokenize(again.String())
	}
	for _, t := range all {
		t.Value, t.Origin = strings.ReplaceAll(t.Value, string(standIn), ":"), strings.ReplaceAll(t.Origin, string(standIn), ":")
	}
	return all
}

// colonsInKeys finds the colons that goccy takes for the ends of keys in braces.
func colonsInKeys(all token.Tokens) (colons []*token.Position) {
	var open []token.Type // brackets and braces
	for i, t := range all {
		switch t.Type {
		case token.MappingStartType, token.SequenceStartType:
			open = append(open, t.Type)
		case token.MappingEndType, token.SequenceEndType:
			open = open[:max(0, len(open)-1)]
		}
		if len(open) == 0 || open[len(open)-1] != token.MappingStartType || i+2 >= len(all) {
			continue
		}
		key, colon, rest := all[i], all[i+1], all[i+2]
		if key.Type == token.StringType && colon.Type == token.MappingValueType && rest.Type == token.StringType && strings.Contains(rest.Value+" ", ": ") &&
			colon.Position.Line == rest.Position.Line && colon.Position.Column+1 == rest.Position.Column {
			colons = append(colons, colon.Position)
		}
	}
	return colons
}
