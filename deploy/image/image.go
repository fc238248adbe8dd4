package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// user is the one that has no rights and no name elsewhere; distroless images
// have it, too.
const user = "65532"

type platformImage struct {
	v1.Image
	platform v1.Platform
	sbom     []byte
}

// image has two layers, so that another binary leaves the first one as it is
// where its libraries haven't changed.
func (b *binary) image(ctx context.Context) (platformImage, error) {
	contents, err := readModules(ctx, b.info)
	if err != nil {
		return platformImage{}, err
	}
	sbom, err := b.sbom(contents)
	if err != nil {
		return platformImage{}, err
	}
	base, err := b.base(contents.licences())
	if err != nil {
		return platformImage{}, err
	}
	executable, err := os.ReadFile(b.path)
	if err != nil {
		return platformImage{}, err
	}
	image := mutate.MediaType(mutate.ConfigMediaType(empty.Image, types.OCIConfigJSON), types.OCIManifestSchema1)
	if image, err = b.add(image, "certificate authorities, user, licences", base); err != nil {
		return platformImage{}, err
	}
	if image, err = b.add(image, "dedupd", map[string]file{"/usr/bin/dedupd": {executable, 0o755}, "/usr/share/sbom/dedupd.spdx.json": {content: sbom}}); err != nil {
		return platformImage{}, err
	}
	if image, err = b.configure(image); err != nil {
		return platformImage{}, err
	}
	return platformImage{Image: image, platform: b.platform, sbom: sbom}, nil
}

// base is what doesn't change with the binary.
func (b *binary) base(licences map[string][]byte) (map[string]file, error) {
	authorities, err := authorities()
	if err != nil {
		return nil, err
	}
	files := map[string]file{
		"/etc/passwd":                        {content: []byte("root:x:0:0:root:/:/sbin/nologin\ndedupd:x:" + user + ":" + user + ":dedupd:/:/sbin/nologin\n")},
		"/etc/group":                         {content: []byte("root:x:0:\ndedupd:x:" + user + ":\n")},
		"/etc/ssl/certs/ca-certificates.crt": {content: authorities},
		"/etc/dedupd/":                       {},
	}
	if b.licence != nil {
		files["/usr/share/licenses/"+b.info.Main.Path+"/LICENSE"] = file{content: b.licence}
	}
	for name, text := range licences {
		files["/usr/share/licenses/"+name] = file{content: text}
	}
	return files, nil
}

// add adds a layer.
func (b *binary) add(image v1.Image, comment string, files map[string]file) (v1.Image, error) {
	layer, err := layer(files, b.created)
	if err != nil {
		return nil, err
	}
	return mutate.Append(image, mutate.Addendum{
		Layer: layer, History: v1.History{Created: v1.Time{Time: b.created}, CreatedBy: "deploy/image", Comment: comment},
	})
}

// configure says how the image runs.
func (b *binary) configure(image v1.Image) (v1.Image, error) {
	config, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Created = b.platform.OS, b.platform.Architecture, v1.Time{Time: b.created}
	config.Config = v1.Config{
		Entrypoint: []string{"/usr/bin/dedupd"},
		Cmd:        []string{"run", "-c", "/etc/dedupd/dedupd.yaml"},
		User:       user + ":" + user,
		WorkingDir: "/",
		// The loopback of a container is nobody's.
		Env:          []string{"DEDUPD_HTTP_LISTEN=:9464"},
		ExposedPorts: map[string]struct{}{"9464/tcp": {}},
		StopSignal:   "SIGTERM",
		Labels: map[string]string{
			"org.opencontainers.image.title":       "dedupd",
			"org.opencontainers.image.description": "Lands Kafka and NATS JetStream topics in Postgres, each message id once.",
			"org.opencontainers.image.source":      "https://" + b.info.Main.Path,
			"org.opencontainers.image.version":     b.version,
			"org.opencontainers.image.created":     b.created.Format(time.RFC3339),
		},
	}
	if revision := setting(b.info, "vcs.revision"); revision != "" {
		config.Config.Labels["org.opencontainers.image.revision"] = revision
	}
	return mutate.ConfigFile(image, config)
}

// file is one of root's, for all to read; a name that ends with a slash is a
// folder's.
type file struct {
	content []byte
	mode    int64 // 0: 0644
}

// layer has the files, and the folders above them, in the order of their names.
func layer(files map[string]file, at time.Time) (v1.Layer, error) {
	folders := map[string]bool{}
	for name := range files {
		if name[len(name)-1] == '/' {
			folders[name] = true
		}
		for dir := path.Dir(path.Clean(name)); dir != "/"; dir = path.Dir(dir) {
			folders[dir+"/"] = true
		}
	}
	names := map[string]bool{}
	maps.Copy(names, folders)
	for name := range files {
		names[name] = true
	}
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	for _, name := range slices.Sorted(maps.Keys(names)) {
		header := &tar.Header{Name: name[1:], ModTime: at, Typeflag: tar.TypeReg, Mode: cmp.Or(files[name].mode, 0o644), Size: int64(len(files[name].content))}
		if folders[name] {
			header.Typeflag, header.Mode = tar.TypeDir, 0o755
		}
		if err := w.WriteHeader(header); err != nil {
			return nil, err
		}
		if _, err := w.Write(files[name].content); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(archive.Bytes())), nil
	}, tarball.WithMediaType(types.OCILayer))
}

// referrer is the list of contents as an artifact that belongs to the image.
func (i platformImage) referrer() (v1.Image, error) {
	subject, err := partial.Descriptor(i)
	if err != nil {
		return nil, err
	}
	const kind = "application/spdx+json"
	list := mutate.MediaType(mutate.ConfigMediaType(empty.Image, kind), types.OCIManifestSchema1)
	if list, err = mutate.AppendLayers(list, static.NewLayer(i.sbom, kind)); err != nil {
		return nil, err
	}
	return mutate.Subject(list, *subject).(v1.Image), nil
}
