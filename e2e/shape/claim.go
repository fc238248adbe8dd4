package shape

// Claim inserts each id once. Its runs are judged by ids alone.
var Claim = &Shape{
	Name: "claim",
	Worker: `id: {from: header:message-id}
sink:
  table:
    name: public.effects
    columns: {id: id, source: "const:main", lane: lane, position: position, n: json:n, payload: value}
`,
}
