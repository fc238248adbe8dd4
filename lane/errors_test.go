package lane

import (
	"errors"
	"testing"

	"github.com/dedupd/dedupd/message"
)

func TestErrorsName(t *testing.T) {
	lane := message.Lane{Source: "main", Name: "orders/3"}
	cause := errors.New("no grant")
	for err, want := range map[error]string{
		&FencedError{[]message.Lane{lane, {Source: "x", Name: "y"}}}: "fenced: another worker owns main:orders/3, x:y, or the database went back",
		&HoldError{Lane: lane, Err: cause}:                           "lane main:orders/3 is held: no grant",
		&HoldError{Err: cause}:                                       "held: no grant",
	} {
		if err.Error() != want {
			t.Errorf("the error is %q, want %q", err, want)
		}
	}
	if !errors.Is(&HoldError{Lane: lane, Err: cause}, cause) {
		t.Error("HoldError hides its cause")
	}
}
