package kafka

import "testing"

func TestThePasswordIsAskedAtEachLogin(t *testing.T) {
	t.Parallel()
	password := "first"
	m, err := SASL{Mechanism: "plain", Username: "dedupd", CurrentPassword: func() (string, error) { return password, nil }}.login()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"first", "second"} {
		password = want
		if _, said, err := m.Start(t.Context()); err != nil || string(said) != "\x00dedupd\x00"+want {
			t.Errorf("logged in with %q, %v; want the password %s", said, err, want)
		}
	}
	if m.Name() != "PLAIN" {
		t.Errorf("the mechanism is called %s", m.Name())
	}
}
