package sum

import "testing"

func TestPositive(t *testing.T) {
	if n, err := Positive([]int{1, 2}); n != 3 || err != nil {
		t.Error(n, err)
	}
	if _, err := Positive([]int{-1}); err == nil {
		t.Error("no error")
	}
}

func TestNext(t *testing.T) {
	if n, ok := Next(1, 9); n != 2 || !ok {
		t.Error(n, ok)
	}
	if _, ok := Next(9, 9); ok {
		t.Error("beyond the limit")
	}
}
