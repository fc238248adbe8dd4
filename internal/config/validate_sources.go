package config

import (
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/dedupd/dedupd/internal/policy"
)

func (v *validator) sources() {
	names := make(map[string]int)
	for i := range v.Sources {
		s := &v.Sources[i]
		at := index("sources", i)
		switch {
		case s.Kafka == nil && s.NATS == nil:
			v.add(at, "must have either kafka or nats, each with its keys")
		case s.Kafka != nil && s.NATS != nil:
			v.add(at, "has both kafka and nats; make two sources of them")
		case s.Kafka != nil:
			v.kafka(at+".kafka", s.Kafka)
		default:
			v.nats(at+".nats", s.NATS)
		}
		v.name(at+".name", s.Name)
		if s.Name == "" {
			continue
		}
		if first, ok := names[s.Name]; ok {
			v.add(at+".name", "%q is also the name of sources[%d]; give each source a name of its own", s.Name, first)
		} else {
			names[s.Name] = i
		}
	}
	v.durables()
}

// durables refuses two sources that read one durable: they would also undo each
// other's filter. The same names on other servers are other durables.
func (v *validator) durables() {
	readers := make(map[string]int) // by server, stream and durable
	for i := range v.Sources {
		n := v.Sources[i].NATS
		if n == nil || v.Sources[i].Kafka != nil {
			continue
		}
		for _, key := range n.readers() {
			if first, ok := readers[key]; ok && first != i {
				at := index("sources", i) + ".nats.durable"
				if v.places[at].line == 0 { // it is the default
					at = index("sources", i) + ".nats.stream"
				}
				v.add(at, "durable %q of stream %s is also that of %s, so each would get a part of the messages; give each source a durable of its own",
					n.Durable, n.Stream, index("sources", first))
				break
			}
			readers[key] = i
		}
	}
}

// readers are what a durable is known by: each server, the stream and its name.
func (n *NATS) readers() (all []string) {
	for _, server := range n.Servers {
		u, err := url.Parse(server)
		if err != nil || u.Host == "" {
			continue
		}
		host := strings.ToLower(u.Host)
		if u.Port() == "" {
			host += ":4222"
		}
		all = append(all, strings.Join([]string{host, n.Stream, n.Durable}, " "))
	}
	return all
}

func (v *validator) kafka(at string, k *Kafka) {
	for i, b := range k.Brokers {
		if err := checkHostPort(b); err != nil {
			v.add(v.item(at+".brokers", i), "%v", err)
		}
	}
	v.unique(at+".topics", k.Topics, "topic", func(s string) bool { return topicPattern.MatchString(s) })
	v.tls(at+".tls", &k.TLS)

	s, sasl := &k.SASL, at+".sasl"
	switch s.Mechanism {
	case policy.MechanismNone:
		if s.Username != "" || s.Password != "" || s.PasswordFile != "" {
			v.add(sasl+".mechanism", "is required beside a username or a password: plain, scram-sha-256 or scram-sha-512")
		}
	case policy.MechanismOAuthBearer:
		v.add(sasl+".mechanism", "oauthbearer is %s; use plain, scram-sha-256 or scram-sha-512", notYet)
	default:
		if s.Username == "" {
			v.add(sasl+".username", "is required with sasl.mechanism %s", s.Mechanism)
		}
		if s.Password == "" && s.PasswordFile == "" {
			v.add(sasl+".password", "is required with sasl.mechanism %s; or password_file", s.Mechanism)
		}
	}
}

func (v *validator) nats(at string, n *NATS) {
	for i, s := range n.Servers {
		u, err := url.Parse(s)
		if err != nil || u.Host == "" || !slices.Contains([]string{"nats", "tls", "ws", "wss"}, u.Scheme) {
			v.add(v.item(at+".servers", i), "%q is no NATS server; write nats://host:4222 or tls://host:4222", redactURL(s))
		}
	}
	if strings.ContainsAny(n.Stream, ". *>/\\\t\r\n") {
		v.add(at+".stream", "%q can't be a stream's name: no dots, spaces, wildcards or slashes", n.Stream)
	}
	if strings.ContainsAny(n.Durable, ". *>/\\\t\r\n") {
		v.add(at+".durable", "%q can't be a consumer's name: no dots, spaces, wildcards or slashes", n.Durable)
	}
	v.unique(at+".subjects", n.Subjects, "subject", isSubject)
	switch {
	case n.Mode == policy.ModeLanes:
		v.add(at+".mode", "lanes is %s; use queue", notYet)
	case n.Lanes != 0:
		v.add(at+".lanes", "only has a meaning with mode lanes; remove it")
	}
	if n.CredsFile != "" && n.NKeySeedFile != "" {
		v.add(at+".nkey_seed_file", "excludes creds_file; keep one of the two")
	}
	v.readable(at+".creds_file", n.CredsFile)
	v.readable(at+".nkey_seed_file", n.NKeySeedFile)
	v.tls(at+".tls", &n.TLS)
}

func (v *validator) tls(at string, t *TLS) {
	if !t.Enabled {
		for _, key := range []struct{ name, value string }{
			{"ca_file", t.CAFile}, {"cert_file", t.CertFile}, {"key_file", t.KeyFile}, {"server_name", t.ServerName},
		} {
			if key.value != "" {
				v.add(at+".enabled", "is false, but %s is set: the connection would not be encrypted; set it to true", key.name)
				return
			}
		}
		return
	}
	if (t.CertFile == "") != (t.KeyFile == "") {
		missing, present := "key_file", "cert_file"
		if t.CertFile == "" {
			missing, present = present, missing
		}
		v.add(at+"."+missing, "is required beside %s: a certificate and its key go together", present)
	}
	if _, err := t.Client(); err != nil {
		for _, p := range split(err, Problem{}) {
			key, text, _ := strings.Cut(p.Message, ": ")
			v.add(at+"."+key, "%s", text)
		}
	}
}

// readable finds a missing file now, not at the first connect.
func (v *validator) readable(at, file string) {
	if file == "" {
		return
	}
	f, err := os.Open(file)
	if err != nil {
		v.add(at, "%v", err)
		return
	}
	f.Close()
}

func (v *validator) unique(at string, list []string, noun string, valid func(string) bool) {
	seen := make(map[string]bool)
	for i, s := range list {
		switch {
		case !valid(s):
			v.add(v.item(at, i), "%q can't be a %s", s, noun)
		case seen[s]:
			v.add(v.item(at, i), "%s is listed twice", s)
		}
		seen[s] = true
	}
}

// topicPattern is what Kafka allows.
var topicPattern = regexp.MustCompile(`^[a-zA-Z0-9._-]{1,249}$`)

// isSubject reports whether s can filter a stream: parts between dots, none empty,
// * only as a whole part, > only as the last one.
func isSubject(s string) bool {
	parts := strings.Split(s, ".")
	for i, p := range parts {
		if p == "" || strings.ContainsAny(p, " \t\r\n") || strings.Contains(p, ">") && (p != ">" || i < len(parts)-1) || strings.Contains(p, "*") && p != "*" {
			return false
		}
	}
	return true
}
