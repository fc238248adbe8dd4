// Package node runs a rendered pod as a node of a cluster would: the image under
// runc, with the user, rights, limits, environment, files and probes of the pod's
// spec, and the end that the spec grants. The kubelet's manual is what it follows.
//
// Two things differ. Pods have no network of their own; each has an address in
// 127.0.0.0/8 and listens there. And only what the chart uses is known: any other
// field of a container or a volume is refused, so that none is passed over.
package node

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/moby/profiles/seccomp"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	corev1 "k8s.io/api/core/v1"
)

// Options of a pod.
type Options struct {
	Image      string // as umoci names it: FOLDER:TAG
	Dir        string // where its files may be
	Name       string // unique on this machine
	Address    string // in 127.0.0.0/8
	Spec       corev1.PodSpec
	ConfigMaps map[string]map[string]string
	Secrets    map[string]map[string]string
	Log        io.Writer // the container's
}

// Pod is a running one, of one container.
type Pod struct {
	o         Options
	container corev1.Container
	command   *exec.Cmd
	volumes   map[string]string // name: folder
	done      chan struct{}
	stopProbe context.CancelFunc
	probing   sync.WaitGroup

	mu      sync.Mutex
	answers []Answer
	started bool
	ready   bool
	code    int
}

// Answer is what a probe was told.
type Answer struct {
	At    time.Time
	Probe string // startup, liveness or readiness
	OK    bool
	Text  string
}

// Tools names the Debian packages that are missing; nil: none is.
func Tools() error {
	var missing []string
	for _, name := range []string{"runc", "umoci"} {
		if _, err := exec.LookPath(name); err != nil {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("%s isn't there: apt-get install runc umoci", strings.Join(missing, " and "))
	}
	if os.Geteuid() != 0 {
		return errors.New("containers with users of their own need root")
	}
	return nil
}

// Start runs the pod and begins to probe it.
func Start(ctx context.Context, o Options) (*Pod, error) {
	p := &Pod{o: o, volumes: map[string]string{}, done: make(chan struct{})}
	if err := p.admit(); err != nil {
		return nil, fmt.Errorf("pod %s: %w", o.Name, err)
	}
	bundle := filepath.Join(o.Dir, "bundle")
	if text, err := exec.CommandContext(ctx, "umoci", "unpack", "--image", o.Image, bundle).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("umoci unpack %s: %w: %s", o.Image, err, text)
	}
	for _, v := range o.Spec.Volumes {
		p.volumes[v.Name] = filepath.Join(o.Dir, "volumes", v.Name)
		if err := p.Mount(v.Name); err != nil {
			return nil, err
		}
	}
	if err := p.configure(filepath.Join(bundle, "config.json")); err != nil {
		return nil, err
	}
	p.command = exec.Command("runc", "run", "--bundle", bundle, o.Name)
	p.command.Stdout, p.command.Stderr = o.Log, o.Log
	// A test that dies takes its containers along.
	p.command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	if err := p.command.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = p.command.Wait() // the code tells
		p.mu.Lock()
		p.code, p.ready = p.command.ProcessState.ExitCode(), false
		p.mu.Unlock()
		close(p.done)
	}()
	probing, cancel := context.WithCancel(context.WithoutCancel(ctx))
	p.stopProbe = cancel
	p.probing.Go(func() { p.probe(probing) })
	return p, nil
}

// admit refuses what this node doesn't do.
func (p *Pod) admit() error {
	spec := p.o.Spec.DeepCopy()
	if len(spec.Containers) != 1 || len(spec.InitContainers) > 0 {
		return errors.New("one container is all it runs")
	}
	p.container = *spec.Containers[0].DeepCopy()
	c := &spec.Containers[0]
	rest := corev1.Container{Lifecycle: c.Lifecycle, RestartPolicy: c.RestartPolicy, StdinOnce: c.StdinOnce, WorkingDir: c.WorkingDir, EnvFrom: c.EnvFrom, VolumeDevices: c.VolumeDevices, Stdin: c.Stdin, TTY: c.TTY, ResizePolicy: c.ResizePolicy}
	if text, err := json.Marshal(rest); err != nil || string(text) != `{"name":"","resources":{}}` {
		return fmt.Errorf("it can't do %s", text)
	}
	if s := c.SecurityContext; s != nil {
		rest := *s
		rest.AllowPrivilegeEscalation, rest.ReadOnlyRootFilesystem, rest.Capabilities, rest.SeccompProfile = nil, nil, nil, nil
		if text, err := json.Marshal(rest); err != nil || string(text) != "{}" {
			return fmt.Errorf("it can't do the security context %s", text)
		}
	}
	for _, e := range c.Env {
		if e.ValueFrom != nil {
			return fmt.Errorf("the variable %s comes from elsewhere", e.Name)
		}
	}
	if s := spec.SecurityContext; s == nil || s.RunAsUser == nil || s.RunAsGroup == nil || s.FSGroup == nil {
		return errors.New("user, group and fsGroup aren't all set")
	} else if s.RunAsNonRoot != nil && *s.RunAsNonRoot && *s.RunAsUser == 0 {
		return errors.New("it may not be root, and is")
	} else {
		rest := *s
		rest.RunAsNonRoot, rest.RunAsUser, rest.RunAsGroup, rest.FSGroup, rest.FSGroupChangePolicy, rest.SeccompProfile = nil, nil, nil, nil, nil, nil
		if text, err := json.Marshal(rest); err != nil || string(text) != "{}" {
			return fmt.Errorf("it can't do the security context %s", text)
		}
	}
	return nil
}

// configure completes what umoci has made of the image's configuration.
func (p *Pod) configure(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var spec specs.Spec
	if err := json.Unmarshal(text, &spec); err != nil {
		return err
	}
	pod, security := p.o.Spec.SecurityContext, p.container.SecurityContext
	if security == nil {
		security = &corev1.SecurityContext{}
	}
	spec.Process.Terminal = false
	entry := spec.Process.Args[:1] // the image's entry point; its arguments are replaced
	if len(p.container.Command) > 0 {
		entry = p.container.Command
	}
	spec.Process.Args = append(slices.Clone(entry), p.container.Args...)
	for _, e := range p.container.Env {
		value := e.Value
		if e.Name == "DEDUPD_HTTP_LISTEN" { // each pod has its address
			value = p.o.Address + value[strings.LastIndex(value, ":"):]
		}
		spec.Process.Env = append(spec.Process.Env, e.Name+"="+value)
	}
	// Every pod gets these, whatever enableServiceLinks says.
	spec.Process.Env = append(spec.Process.Env, "KUBERNETES_SERVICE_HOST=10.96.0.1", "KUBERNETES_SERVICE_PORT=443", "KUBERNETES_PORT=tcp://10.96.0.1:443")
	spec.Process.User = specs.User{UID: uint32(*pod.RunAsUser), GID: uint32(*pod.RunAsGroup), AdditionalGids: []uint32{uint32(*pod.FSGroup)}} //nolint:gosec // small
	spec.Process.NoNewPrivileges = security.AllowPrivilegeEscalation != nil && !*security.AllowPrivilegeEscalation
	if security.Capabilities != nil && slices.Contains(security.Capabilities.Drop, "ALL") && len(security.Capabilities.Add) == 0 {
		spec.Process.Capabilities = &specs.LinuxCapabilities{}
	}
	spec.Root.Readonly = security.ReadOnlyRootFilesystem != nil && *security.ReadOnlyRootFilesystem
	spec.Hostname = p.o.Name
	spec.Linux.CgroupsPath = "/" + p.o.Name
	spec.Linux.Namespaces = slices.DeleteFunc(spec.Linux.Namespaces, func(n specs.LinuxNamespace) bool { return n.Type == specs.NetworkNamespace })
	if limit, ok := p.container.Resources.Limits[corev1.ResourceMemory]; ok {
		bytes := limit.Value()
		spec.Linux.Resources.Memory = &specs.LinuxMemory{Limit: &bytes}
	}
	profile := pod.SeccompProfile
	if security.SeccompProfile != nil {
		profile = security.SeccompProfile
	}
	if profile != nil && profile.Type == corev1.SeccompProfileTypeRuntimeDefault {
		if spec.Linux.Seccomp, err = seccomp.GetDefaultProfile(&spec); err != nil {
			return err
		}
	}
	for _, m := range p.container.VolumeMounts {
		options := []string{"rbind", "nosuid", "nodev"}
		if m.ReadOnly {
			options = append(options, "ro")
		}
		if m.SubPath != "" {
			return fmt.Errorf("the volume %s is mounted in part", m.Name)
		}
		spec.Mounts = append(spec.Mounts, specs.Mount{Destination: m.MountPath, Type: "bind", Source: p.volumes[m.Name], Options: options})
	}
	spec.Mounts = append(spec.Mounts, specs.Mount{Destination: "/etc/resolv.conf", Type: "bind", Source: "/etc/resolv.conf", Options: []string{"rbind", "ro"}})
	if text, err = json.Marshal(spec); err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o600)
}

// Mount writes a volume's files, at first or anew, as the kubelet does: into a
// folder of their own, which a link then names (its AtomicWriter).
func (p *Pod) Mount(name string) error {
	at := slices.IndexFunc(p.o.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == name })
	volume, group := p.o.Spec.Volumes[at], int(*p.o.Spec.SecurityContext.FSGroup)
	dir := p.volumes[name]
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	files := map[string]string{}
	add := func(from map[string]string, what string, items []corev1.KeyToPath) error {
		if from == nil {
			return fmt.Errorf("%s isn't there", what)
		}
		if len(items) == 0 {
			for key := range from {
				items = append(items, corev1.KeyToPath{Key: key, Path: key})
			}
		}
		for _, i := range items {
			text, ok := from[i.Key]
			if !ok {
				return fmt.Errorf("%s has no key %q", what, i.Key)
			}
			files[i.Path] = text
		}
		return nil
	}
	mode := int32(0o644)
	var err error
	switch v := volume.VolumeSource; {
	case v.ConfigMap != nil:
		mode = value(v.ConfigMap.DefaultMode, mode)
		err = add(p.o.ConfigMaps[v.ConfigMap.Name], "the ConfigMap "+v.ConfigMap.Name, v.ConfigMap.Items)
	case v.Secret != nil:
		mode = value(v.Secret.DefaultMode, mode)
		err = add(p.o.Secrets[v.Secret.SecretName], "the Secret "+v.Secret.SecretName, v.Secret.Items)
	case v.Projected != nil:
		mode = value(v.Projected.DefaultMode, mode)
		for _, s := range v.Projected.Sources {
			if s.Secret == nil {
				return fmt.Errorf("the volume %s projects more than Secrets", name)
			}
			err = errors.Join(err, add(p.o.Secrets[s.Secret.Name], "the Secret "+s.Secret.Name, s.Secret.Items))
		}
	case v.EmptyDir != nil:
		return errors.Join(os.Chown(dir, 0, group), os.Chmod(dir, 0o2777)) //nolint:gosec // as the kubelet makes it
	default:
		err = fmt.Errorf("the volume %s is of an unknown kind", name)
	}
	if err != nil {
		return err
	}
	now := time.Now().Format("..2006_01_02_15_04_05.000000000")
	for path, text := range files {
		file := filepath.Join(dir, now, path)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		// The pod's group may read them, whatever the mode (SetVolumeOwnership).
		if err := errors.Join(os.WriteFile(file, []byte(text), 0o600), os.Chown(file, 0, group), os.Chmod(file, os.FileMode(mode)|0o440)); err != nil {
			return err
		}
		top, _, _ := strings.Cut(path, "/")
		if err := os.Symlink(filepath.Join("..data", top), filepath.Join(dir, top)); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	link := filepath.Join(dir, "..data_tmp")
	return errors.Join(os.Symlink(now, link), os.Rename(link, filepath.Join(dir, "..data")))
}

func value(p *int32, otherwise int32) int32 {
	if p != nil {
		return *p
	}
	return otherwise
}

// probe asks as the kubelet does: the start until it has succeeded, then life and
// readiness. A pod that fails to start or to live is ended.
func (p *Pod) probe(ctx context.Context) {
	c := p.container
	var all sync.WaitGroup
	if !p.until(ctx, "startup", c.StartupProbe) {
		return
	}
	p.mu.Lock()
	p.started = true
	p.mu.Unlock()
	all.Go(func() { p.until(ctx, "liveness", c.LivenessProbe) })
	all.Go(func() { p.until(ctx, "readiness", c.ReadinessProbe) })
	all.Wait()
}

// until asks for the start until it has an answer, for anything else as long as
// the pod runs.
func (p *Pod) until(ctx context.Context, kind string, probe *corev1.Probe) (ok bool) {
	if probe == nil || probe.HTTPGet == nil {
		p.note(kind, false, "the pod has no such probe, or none over HTTP")
		return false
	}
	client := &http.Client{Timeout: time.Duration(cmp.Or(probe.TimeoutSeconds, 1)) * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	tick := time.NewTicker(time.Duration(cmp.Or(probe.PeriodSeconds, 10)) * time.Second)
	defer tick.Stop()
	failures := int32(0)
	for {
		err := p.ask(ctx, client, probe.HTTPGet)
		if ctx.Err() != nil {
			return false
		}
		p.note(kind, err == nil, fmt.Sprint(err))
		failures++
		if err == nil {
			failures = 0
		}
		failed := failures >= cmp.Or(probe.FailureThreshold, 3)
		switch {
		case kind == "startup" && err == nil:
			return true
		case kind == "readiness":
			p.mu.Lock()
			p.ready = err == nil || p.ready && !failed
			p.mu.Unlock()
		case failed:
			go func() { _, _ = p.Stop() }()
			return false
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return false
		}
	}
}

func (p *Pod) ask(ctx context.Context, client *http.Client, get *corev1.HTTPGetAction) error {
	at := slices.IndexFunc(p.container.Ports, func(port corev1.ContainerPort) bool { return port.Name == get.Port.StrVal })
	if at < 0 {
		return fmt.Errorf("the container has no port %s", get.Port.String())
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://%s:%d%s", p.o.Address, p.container.Ports[at].ContainerPort, get.Path), nil)
	if err != nil {
		return err
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, _ := io.ReadAll(io.LimitReader(response.Body, 10<<10))
	if response.StatusCode < 200 || response.StatusCode >= 400 {
		return fmt.Errorf("%s: %s", response.Status, text)
	}
	return nil
}

func (p *Pod) note(kind string, ok bool, text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.answers = append(p.answers, Answer{time.Now(), kind, ok, text})
}

// Stop ends the pod as its deletion does: probes for life end, SIGTERM, the grace
// period, SIGKILL. It tells the exit code, and whether it had to be killed.
func (p *Pod) Stop() (code int, killed bool) {
	p.signal("TERM")
	grace := 30 * time.Second
	if g := p.o.Spec.TerminationGracePeriodSeconds; g != nil {
		grace = time.Duration(*g) * time.Second
	}
	select {
	case <-p.done:
	case <-time.After(grace):
		killed = true
		p.signal("KILL")
		<-p.done
	}
	p.stopProbe()
	p.probing.Wait()
	return p.code, killed
}

func (p *Pod) signal(name string) {
	_ = exec.Command("runc", "kill", p.o.Name, name).Run() // it may have ended
}

// Kill ends it at once.
func (p *Pod) Kill() {
	p.signal("KILL")
	<-p.done
	p.stopProbe()
	p.probing.Wait()
}

// Done is closed when the container has ended.
func (p *Pod) Done() <-chan struct{} { return p.done }

// Code is the container's exit code, once it has ended.
func (p *Pod) Code() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.code
}

// Started reports whether the startup probe has succeeded; Ready, whether the
// readiness probe says so.
func (p *Pod) Started() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.started
}

// Ready tells what the readiness probe says.
func (p *Pod) Ready() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ready
}

// Answers are what the probes were told so far.
func (p *Pod) Answers() []Answer {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.answers)
}

// Pid is the container's first process, as this machine numbers it.
func (p *Pod) Pid() (int, error) {
	text, err := exec.Command("runc", "state", p.o.Name).Output()
	if err != nil {
		return 0, err
	}
	var state struct{ Pid int }
	err = json.Unmarshal(text, &state)
	return state.Pid, err
}

// URL of a path on the pod's port.
func (p *Pod) URL(path string) string {
	return fmt.Sprintf("http://%s:%d%s", p.o.Address, p.container.Ports[0].ContainerPort, path)
}
