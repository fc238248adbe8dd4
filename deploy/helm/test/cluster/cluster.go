// Package cluster runs Kubernetes' API server on this machine, with an etcd of its
// own: objects are validated, admitted, completed and stored as in any cluster.
// Nothing acts on them.
package cluster

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"sigs.k8s.io/yaml"
)

// Cluster is a running API server.
type Cluster struct {
	// Kubeconfig is a file that lets its reader do everything.
	Kubeconfig string

	dir       string
	url       string
	client    *http.Client
	processes []*process
}

// token is the administrator's. The server listens on this machine only, as long
// as a test takes.
const token = "administrator"

// Start runs etcd, of Debian's etcd-server, and an API server's binary, with their
// files in a folder. Stop ends them.
func Start(ctx context.Context, dir, apiserver string) (_ *Cluster, err error) {
	c := &Cluster{dir: dir, Kubeconfig: filepath.Join(dir, "kubeconfig")}
	defer func() {
		if err != nil {
			c.Stop()
		}
	}()
	ports, err := freePorts(3)
	if err != nil {
		return nil, err
	}
	store, peers := "http://"+ports[0], "http://"+ports[1]
	if err := c.run("etcd", "etcd", "--data-dir", filepath.Join(dir, "etcd"), "--log-level", "error",
		"--listen-client-urls", store, "--advertise-client-urls", store, "--listen-peer-urls", peers,
		"--initial-advertise-peer-urls", peers, "--initial-cluster", "default="+peers); err != nil {
		return nil, fmt.Errorf("%w (apt-get install etcd-server)", err)
	}
	key, tokens := filepath.Join(dir, "accounts.key"), filepath.Join(dir, "tokens")
	if err := errors.Join(writeKey(key), os.WriteFile(tokens, []byte(token+",administrator,administrator,system:masters\n"), 0o600)); err != nil {
		return nil, err
	}
	host, port, _ := net.SplitHostPort(ports[2])
	c.url = "https://" + ports[2]
	if err := c.run("kube-apiserver", apiserver, "--etcd-servers", store,
		"--bind-address", host, "--advertise-address", host, "--secure-port", port, "--cert-dir", dir,
		"--service-cluster-ip-range", "10.0.0.0/24", "--authorization-mode", "RBAC", "--token-auth-file", tokens,
		"--service-account-issuer", c.url, "--service-account-key-file", key, "--service-account-signing-key-file", key,
		// Nobody makes a namespace's account default.
		"--disable-admission-plugins", "ServiceAccount"); err != nil {
		return nil, err
	}
	return c, c.await(ctx)
}

// await waits until the server answers, and writes the kubeconfig.
func (c *Cluster) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	certificate := filepath.Join(c.dir, "apiserver.crt") // with the authority that the server has made for it
	var last error
	for ctx.Err() == nil {
		for _, p := range c.processes {
			select {
			case <-p.done:
				return fmt.Errorf("%s has ended: %s", p.name, p.tail())
			default:
			}
		}
		text, err := os.ReadFile(certificate)
		if err == nil {
			pool := x509.NewCertPool()
			pool.AppendCertsFromPEM(text)
			c.client = &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}}}
			var a *Answer
			if a, err = c.Ask(ctx, http.MethodGet, "/readyz", "", nil); err == nil && a.Code != http.StatusOK {
				err = fmt.Errorf("%d %s", a.Code, a.Body)
			}
		}
		if err == nil {
			return os.WriteFile(c.Kubeconfig, fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: %q, certificate-authority: %q}}]
users: [{name: administrator, user: {token: %s}}]
contexts: [{name: test, context: {cluster: test, user: administrator}}]
current-context: test
`, c.url, certificate, token), 0o600)
		}
		last = err
		time.Sleep(200 * time.Millisecond)
	}
	return fmt.Errorf("the API server isn't ready: %w: %s", last, c.processes[len(c.processes)-1].tail())
}

// Stop ends the server, and then its etcd.
func (c *Cluster) Stop() {
	for i := len(c.processes) - 1; i >= 0; i-- {
		c.processes[i].stop()
	}
}

// Answer is what the server says to a request.
type Answer struct {
	Code     int
	Warnings []string
	Body     []byte
}

// Ask sends a request to a path, which may have a query.
func (c *Cluster) Ask(ctx context.Context, method, path, contentType string, body []byte) (*Answer, error) {
	request, err := http.NewRequestWithContext(ctx, method, c.url+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Authorization", "Bearer "+token)
	if contentType != "" {
		request.Header.Set("Content-Type", contentType)
	}
	response, err := c.client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	a := &Answer{Code: response.StatusCode, Warnings: response.Header.Values("Warning")}
	a.Body, err = io.ReadAll(response.Body)
	return a, err
}

// Object is what is common to all objects.
type Object struct {
	APIVersion, Kind string
	Metadata         struct{ Name, Namespace string }
}

// Path is where objects of this kind lie: of the object's namespace, or else of
// the one that is given. A namespace "" makes it a kind without.
func (o Object) Path(namespace string) string {
	path := "/apis/" + o.APIVersion
	if !strings.Contains(o.APIVersion, "/") {
		path = "/api/" + o.APIVersion
	}
	if o.Metadata.Namespace != "" {
		namespace = o.Metadata.Namespace
	}
	if namespace != "" {
		path += "/namespaces/" + namespace
	}
	plural := strings.ToLower(o.Kind)
	switch {
	case strings.HasSuffix(plural, "y"):
		plural = strings.TrimSuffix(plural, "y") + "ies"
	case strings.HasSuffix(plural, "s"):
		plural += "es"
	default:
		plural += "s"
	}
	return path + "/" + plural
}

// Apply has the server apply an object, in YAML, as Helm does: fields that it
// doesn't know, or that stand twice, are errors. dry changes nothing.
func (c *Cluster) Apply(ctx context.Context, namespace, text string, dry bool) (*Answer, error) {
	var o Object
	if err := yaml.Unmarshal([]byte(text), &o); err != nil {
		return nil, err
	}
	query := url.Values{"fieldManager": {"helm"}, "fieldValidation": {"Strict"}, "force": {"true"}}
	if dry {
		query.Set("dryRun", "All")
	}
	return c.Ask(ctx, http.MethodPatch, o.Path(namespace)+"/"+o.Metadata.Name+"?"+query.Encode(), "application/apply-patch+yaml", []byte(text))
}

// Get reads what lies at a path.
func Get[T any](ctx context.Context, c *Cluster, path string) (*T, error) {
	a, err := c.Ask(ctx, http.MethodGet, path, "", nil)
	if err != nil {
		return nil, err
	}
	if a.Code != http.StatusOK {
		return nil, fmt.Errorf("GET %s: %d %s", path, a.Code, a.Body)
	}
	into := new(T)
	return into, json.Unmarshal(a.Body, into)
}

// process is a child that ends with its parent.
type process struct {
	name    string
	command *exec.Cmd
	log     string
	done    chan struct{}
}

func (c *Cluster) run(name, program string, args ...string) error {
	p := &process{name: name, command: exec.Command(program, args...), log: filepath.Join(c.dir, name+".log"), done: make(chan struct{})}
	log, err := os.Create(p.log)
	if err != nil {
		return err
	}
	defer log.Close()
	p.command.Stdout, p.command.Stderr = log, log
	p.command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.command.Start(); err != nil {
		return err
	}
	c.processes = append(c.processes, p)
	go func() {
		_ = p.command.Wait() // the log says why
		close(p.done)
	}()
	return nil
}

func (p *process) stop() {
	_ = p.command.Process.Signal(syscall.SIGTERM) // it may have ended
	select {
	case <-p.done:
	case <-time.After(20 * time.Second):
		_ = p.command.Process.Kill()
		<-p.done
	}
}

// tail is the end of the log.
func (p *process) tail() string {
	text, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(text[max(0, len(text)-4<<10):])
}

func writeKey(path string) error {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return err
	}
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}), 0o600)
}

// freePorts are addresses that nobody listens on.
func freePorts(n int) (all []string, err error) {
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close() // all at the end: they differ
		all = append(all, l.Addr().String())
	}
	return all, nil
}
