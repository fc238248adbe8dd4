package top

import "strings"

// key is a key that somebody has pressed.
type key string

const (
	keyUp     key = "up"
	keyDown   key = "down"
	keyPageUp key = "page up"
	keyPageDn key = "page down"
	keyHome   key = "home"
	keyEnd    key = "end"
	keyEscape key = "escape"
	keyBreak  key = "ctrl-c"
	keyStop   key = "ctrl-z"
)

var sequences = []struct {
	bytes string
	key   key
}{
	{"\x1b[A", keyUp},
	{"\x1bOA", keyUp},
	{"\x1b[B", keyDown},
	{"\x1bOB", keyDown},
	{"\x1b[5~", keyPageUp},
	{"\x1b[6~", keyPageDn},
	{"\x1b[H", keyHome},
	{"\x1bOH", keyHome},
	{"\x1b[1~", keyHome},
	{"\x1b[7~", keyHome},
	{"\x1b[F", keyEnd},
	{"\x1bOF", keyEnd},
	{"\x1b[4~", keyEnd},
	{"\x1b[8~", keyEnd},
}

// parseKeys reads what a terminal has sent at once. rest is the beginning of an
// incomplete sequence.
func parseKeys(text string) (keys []key, rest string) {
next:
	for text != "" {
		for _, s := range sequences {
			if after, ok := strings.CutPrefix(text, s.bytes); ok {
				keys, text = append(keys, s.key), after
				continue next
			}
		}
		switch {
		case text[0] == 3:
			keys = append(keys, keyBreak)
		case text[0] == 26:
			keys = append(keys, keyStop)
		case text == "\x1b":
			keys = append(keys, keyEscape)
		case text[0] == 0x1b && (text[1] == '[' || text[1] == 'O'):
			// Some other key: skip it up to its final letter.
			end := strings.IndexFunc(text[2:], func(r rune) bool { return r >= '@' && r <= '~' })
			if end < 0 {
				return keys, text
			}
			text = text[2+end+1:]
			continue next
		case text[0] == 0x1b:
			keys = append(keys, keyEscape)
		default:
			keys = append(keys, key(text[:1]))
		}
		text = text[1:]
	}
	return keys, ""
}

// press applies a key to a screen with so many rows of lanes. It returns whether to
// quit.
func (v *View) press(k key, rows int) (quit bool) {
	lanes := 0
	if v.Frame != nil {
		lanes = len(v.Frame.Sample.Lanes)
	}
	switch k {
	case "q", "Q", keyBreak:
		return true
	case "?", "h":
		v.Help = !v.Help
	case keyEscape:
		v.Help = false
	case "s":
		v.Sort, v.First = v.Sort.next(1), 0
	case "S":
		v.Sort, v.First = v.Sort.next(-1), 0
	case " ":
		v.Paused = !v.Paused
	case keyUp, "k":
		v.First--
	case keyDown, "j":
		v.First++
	case keyPageUp:
		v.First -= rows
	case keyPageDn:
		v.First += rows
	case keyHome:
		v.First = 0
	case keyEnd:
		v.First = lanes
	}
	v.First = max(0, min(v.First, lanes-rows))
	return false
}
