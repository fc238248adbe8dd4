package kafka

import "testing"

// password is a password that doesn't change.
func password(text string) func() (string, error) {
	return func() (string, error) { return text, nil }
}

func TestThePasswordIsAskedAtEachLogin(t *testing.T) {
	t.Parallel()
	current := "first"
	m, err := SASL{Mechanism: "plain", Username: "dedupd", CurrentPassword: func() (string, error) { return current, nil }}.login()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"first", "second"} {
		current = want
		if _, said, err := m.Start(t.Context()); err != nil || string(said) != "\x00dedupd\x00"+want {
			t.Errorf("logged in with %q, %v; want the password %s", said, err, want)
		}
	}
	if m.Name() != "PLAIN" {
		t.Errorf("the mechanism is called %s", m.Name())
	}
}
