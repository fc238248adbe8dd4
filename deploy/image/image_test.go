package main

import (
	"archive/tar"
	"bytes"
	"debug/buildinfo"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	spdxjson "github.com/spdx/tools-golang/json"
)

const repo = "../.."

// build compiles the product from a folder, as `make image` does.
func build(t *testing.T, dir string) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "dedupd")
	command := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", out, "./cmd/dedupd")
	command.Dir, command.Env = dir, append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64")
	if text, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	return out
}

// buildEmpty compiles a program that does nothing: where only the platform
// counts, dedupd itself would take a minute.
func buildEmpty(t *testing.T, environment ...string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{"go.mod": "module example.com/empty\n\ngo 1.26.0\n", "main.go": "package main\n\nfunc main() {}\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	out := filepath.Join(dir, "empty")
	command := exec.Command("go", "build", "-trimpath", "-o", out, ".")
	command.Dir, command.Env = dir, append(os.Environ(), environment...)
	if text, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	return out
}

// images reads those of a layout, by platform.
func images(t *testing.T, dir string) map[string]v1.Image {
	t.Helper()
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Index(index); err != nil {
		t.Fatal(err)
	}
	found := map[string]v1.Image{}
	var walk func(v1.ImageIndex)
	walk = func(index v1.ImageIndex) {
		manifest, err := index.IndexManifest()
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range manifest.Manifests {
			if m.MediaType.IsIndex() {
				inner, err := index.ImageIndex(m.Digest)
				if err != nil {
					t.Fatal(err)
				}
				walk(inner)
				continue
			}
			image, err := index.Image(m.Digest)
			if err != nil {
				t.Fatal(err)
			}
			found[m.Platform.String()] = image
		}
	}
	walk(index)
	return found
}

// root reads what an image has.
func root(t *testing.T, image v1.Image) (headers map[string]*tar.Header, contents map[string][]byte) {
	t.Helper()
	headers, contents = map[string]*tar.Header{}, map[string][]byte{}
	flat := mutate.Extract(image)
	defer flat.Close()
	for r := tar.NewReader(flat); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return headers, contents
		} else if err != nil {
			t.Fatal(err)
		}
		headers["/"+h.Name] = h
		if contents["/"+h.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
}

// built is an image and what it was built from.
type built struct {
	binary, out string
	image       v1.Image
	headers     map[string]*tar.Header
	contents    map[string][]byte
}

func TestImage(t *testing.T) {
	t.Parallel()
	b := &built{binary: build(t, repo), out: filepath.Join(t.TempDir(), "image")}
	if err := run(t.Context(), options{out: b.out, name: "dedupd", version: "v1.2.3", licence: repo + "/LICENSE"}, []string{b.binary}); err != nil {
		t.Fatal(err)
	}
	if b.image = images(t, b.out)["linux/amd64"]; b.image == nil {
		t.Fatal("the layout has no image for linux/amd64")
	}
	b.headers, b.contents = root(t, b.image)
	t.Run("nobody can change it, and nothing raises rights", b.wantRights)
	t.Run("the binary is the one that was given", b.wantBinary)
	t.Run("it knows certificate authorities", b.wantAuthorities)
	t.Run("its list names each module of the binary, and each has its licence", b.wantList)
	t.Run("the Dockerfile says the same", b.wantDockerfile)
}

func (b *built) wantRights(t *testing.T) {
	for name, h := range b.headers {
		if h.Uid != 0 || h.Gid != 0 || h.Mode&0o7022 != 0 {
			t.Errorf("%s belongs to %d:%d with mode %o", name, h.Uid, h.Gid, h.Mode)
		}
		if h.Typeflag == tar.TypeReg && h.Mode&0o111 != 0 && name != "/usr/bin/dedupd" {
			t.Errorf("%s can be executed", name)
		}
	}
}

func (b *built) wantBinary(t *testing.T) {
	want, err := os.ReadFile(b.binary)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(b.contents["/usr/bin/dedupd"], want) || b.headers["/usr/bin/dedupd"].Mode != 0o755 {
		t.Error("it isn't, or can't be executed")
	}
}

func (b *built) wantAuthorities(t *testing.T) {
	n := bytes.Count(b.contents["/etc/ssl/certs/ca-certificates.crt"], []byte("BEGIN CERTIFICATE"))
	if block, _ := pem.Decode(b.contents["/etc/ssl/certs/ca-certificates.crt"]); block == nil || n < 100 {
		t.Errorf("%d of them", n)
	}
}

func (b *built) wantList(t *testing.T) {
	list, err := spdxjson.Read(bytes.NewReader(b.contents["/usr/share/sbom/dedupd.spdx.json"]))
	if err != nil {
		t.Fatal(err)
	}
	listed := map[string]bool{}
	for _, p := range list.Packages {
		listed[p.PackageName+"@"+p.PackageVersion] = true
	}
	info, err := buildinfo.ReadFile(b.binary)
	if err != nil {
		t.Fatal(err)
	}
	if len(info.Deps) < 15 || !listed["github.com/dedupd/dedupd@v1.2.3"] || !listed["stdlib@"+strings.TrimPrefix(info.GoVersion, "go")] {
		t.Errorf("dedupd or Go is missing in %v", listed)
	}
	for _, m := range info.Deps {
		if !listed[m.Path+"@"+m.Version] {
			t.Errorf("%s %s is missing", m.Path, m.Version)
		}
		if !slices.ContainsFunc(keys(b.headers), func(name string) bool { return strings.HasPrefix(name, "/usr/share/licenses/"+m.Path+"/") }) {
			t.Errorf("%s has no licence", m.Path)
		}
	}
	if beside, err := os.ReadFile(filepath.Join(b.out, "linux-amd64.spdx.json")); err != nil || !bytes.Equal(beside, b.contents["/usr/share/sbom/dedupd.spdx.json"]) {
		t.Errorf("the list beside the image is another one, %v", err)
	}
}

func (b *built) wantDockerfile(t *testing.T) {
	file, err := os.ReadFile(repo + "/Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	config, err := b.image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	quoted := func(list []string) string {
		text, _ := json.Marshal(list)
		return strings.ReplaceAll(string(text), ",", ", ")
	}
	for instruction, want := range map[string]string{
		"USER": config.Config.User, "ENV": config.Config.Env[len(config.Config.Env)-1], "EXPOSE": keys(config.Config.ExposedPorts)[0],
		"STOPSIGNAL": config.Config.StopSignal, "ENTRYPOINT": quoted(config.Config.Entrypoint), "CMD": quoted(config.Config.Cmd),
	} {
		said := regexp.MustCompile(`(?m)^`+instruction+` (.*)$`).FindAllSubmatch(file, -1)
		if len(said) != 1 || string(said[0][1]) != want {
			t.Errorf("%s: it says %q, the image has %q", instruction, said, want)
		}
	}
	for _, name := range []string{"/etc/passwd", "/etc/group"} {
		if text := strings.ReplaceAll(string(b.contents[name]), "\n", `\n`); !bytes.Contains(file, []byte("printf '"+text+"' > /root-fs"+name)) {
			t.Errorf("its %s isn't %q", name, text)
		}
	}
}

func keys[V any](m map[string]V) (list []string) {
	for k := range m {
		list = append(list, k)
	}
	return list
}

// TestSameSourcesGiveTheSameImage builds two clones in two places.
func TestSameSourcesGiveTheSameImage(t *testing.T) {
	t.Parallel()
	var digests []v1.Hash
	for range 2 {
		clone := filepath.Join(t.TempDir(), "clone")
		if text, err := exec.Command("git", "clone", "-q", repo, clone).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
		out := filepath.Join(t.TempDir(), "image")
		if err := run(t.Context(), options{out: out, name: "dedupd", version: "v1.2.3", licence: clone + "/LICENSE"}, []string{build(t, clone)}); err != nil {
			t.Fatal(err)
		}
		digest, err := images(t, out)["linux/amd64"].Digest()
		if err != nil {
			t.Fatal(err)
		}
		digests = append(digests, digest)
	}
	if digests[0] != digests[1] {
		t.Errorf("they give %v", digests)
	}
}

// TestPush pushes an index to a registry, and asks it for what belongs to it.
func TestPush(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(registry.New(registry.WithReferrersSupport(true), registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	repository := strings.TrimPrefix(server.URL, "http://") + "/team/dedupd"
	binaries := []string{build(t, repo), buildEmpty(t, "CGO_ENABLED=0", "GOOS=linux", "GOARCH=arm64")}
	out := filepath.Join(t.TempDir(), "image")
	if err := run(t.Context(), options{out: out, name: repository, version: "v1.2.3", push: true}, binaries); err != nil {
		t.Fatal(err)
	}
	if found := images(t, out); found["linux/amd64"] == nil || found["linux/arm64"] == nil {
		t.Fatalf("the layout has %v", found)
	}
	tag, err := name.NewTag(repository + ":v1.2.3")
	if err != nil {
		t.Fatal(err)
	}
	index, err := remote.Index(tag)
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Index(index); err != nil {
		t.Error(err)
	}
	manifest, err := index.IndexManifest()
	if err != nil || len(manifest.Manifests) != 2 {
		t.Fatalf("the registry has %+v, %v", manifest, err)
	}
	for _, m := range manifest.Manifests {
		referrers, err := remote.Referrers(tag.Context().Digest(m.Digest.String()))
		if err != nil {
			t.Fatal(err)
		}
		lists, err := referrers.IndexManifest()
		if err != nil || len(lists.Manifests) != 1 || lists.Manifests[0].ArtifactType != "application/spdx+json" {
			t.Errorf("%s has the referrers %+v, %v", m.Platform, lists, err)
		}
	}
}

// TestBinariesThatCantRun are refused with what to do.
func TestBinariesThatCantRun(t *testing.T) {
	t.Parallel()
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("#!/bin/sh\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		buildEmpty(t, "CGO_ENABLED=0", "GOOS=darwin", "GOARCH=arm64"): "build it with GOOS=linux",
		buildEmpty(t, "CGO_ENABLED=1"):                                "build it with CGO_ENABLED=0",
		text:                                                          "could not read Go build info",
		"/nowhere":                                                    "no such file",
	} {
		err := run(t.Context(), options{out: filepath.Join(t.TempDir(), "image"), name: "dedupd", version: "v1"}, []string{path})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
	}
}
