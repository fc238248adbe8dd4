// Command image puts built binaries of dedupd, or of a custom build of it, into a
// container image. It needs neither a daemon nor root nor a base image:
//
//	go run . -o DIR -name NAME -version VERSION [-licence FILE] [-push] BINARY...
//
// The image holds what the Dockerfile at the repository's top makes as well: the
// binary, certificate authorities, a user without rights, and the list and the
// licences of what the binary is built from. It has no shell. Several binaries,
// one for each platform, make an index of images.
//
// DIR gets the layout of the OCI image specification, which umoci, skopeo and
// podman read, and for each platform PLATFORM.tar, which `docker load` and `ctr
// image import` read, and PLATFORM.spdx.json. The same binaries give the same
// bytes, on any machine: all times are the commit's, or SOURCE_DATE_EPOCH.
package main

import (
	"context"
	"debug/buildinfo"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

func main() {
	if err := command(); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

func command() error {
	out := flag.String("o", "", "the folder to write; what was there before is replaced")
	repository := flag.String("name", "dedupd", "the image's name, with its registry if it is to be pushed")
	version := flag.String("version", "", "the version, which becomes the tag")
	licence := flag.String("licence", "", "the binary's own licence, a file")
	push := flag.Bool("push", false, "push it too, with the credentials that `docker login` has stored")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return run(ctx, options{*out, *repository, *version, *licence, *push}, flag.Args())
}

type options struct {
	out, name, version, licence string
	push                        bool
}

func run(ctx context.Context, o options, paths []string) error {
	if o.out == "" || o.version == "" || len(paths) == 0 {
		return errors.New("-o, -version and at least one binary are needed")
	}
	tag, err := name.NewTag(o.name + ":" + o.version)
	if err != nil {
		return err
	}
	var images []platformImage
	for _, path := range paths {
		b, err := readBinary(path, o.version)
		if err != nil {
			return err
		}
		if o.licence != "" {
			if b.licence, err = os.ReadFile(o.licence); err != nil {
				return err
			}
		}
		image, err := b.image(ctx)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		images = append(images, image)
	}
	if err := write(o.out, tag, images); err != nil {
		return err
	}
	for _, i := range images {
		digest, err := i.Digest()
		if err != nil {
			return err
		}
		fmt.Printf("%s %s@%s\n", i.platform, tag, digest)
	}
	if !o.push {
		return nil
	}
	return pushAll(ctx, tag, images)
}

// binary is what an image is made of.
type binary struct {
	path, version string
	info          *buildinfo.BuildInfo
	platform      v1.Platform
	created       time.Time
	licence       []byte // nil: it tells none
}

func readBinary(path, version string) (*binary, error) {
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return nil, err
	}
	b := &binary{path: path, version: version, info: info, platform: v1.Platform{OS: setting(info, "GOOS"), Architecture: setting(info, "GOARCH")}}
	if b.platform.OS != "linux" {
		return nil, fmt.Errorf("%s is for %s: containers run linux, build it with GOOS=linux", path, b.platform.OS)
	}
	if setting(info, "CGO_ENABLED") != "0" {
		return nil, fmt.Errorf("%s needs a C library, which the image has not: build it with CGO_ENABLED=0", path)
	}
	if b.created, err = created(info); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return b, nil
}

func setting(info *buildinfo.BuildInfo, key string) string {
	for _, s := range info.Settings {
		if s.Key == key {
			return s.Value
		}
	}
	return ""
}

// created is the time that all files bear. The clock's would make each build
// another image.
func created(info *buildinfo.BuildInfo) (time.Time, error) {
	if epoch := os.Getenv("SOURCE_DATE_EPOCH"); epoch != "" {
		seconds, err := strconv.ParseInt(epoch, 10, 64)
		if err != nil {
			return time.Time{}, fmt.Errorf("SOURCE_DATE_EPOCH %q is no number of seconds", epoch)
		}
		return time.Unix(seconds, 0).UTC(), nil
	}
	if commit := setting(info, "vcs.time"); commit != "" {
		return time.Parse(time.RFC3339, commit)
	}
	return time.Unix(0, 0).UTC(), nil
}

// write makes the folder, whole or not at all.
func write(out string, tag name.Tag, images []platformImage) error {
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		return err
	}
	temp, err := os.MkdirTemp(filepath.Dir(out), ".image-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(temp) }() // gone, once it is renamed
	if err := os.Chmod(temp, 0o755); err != nil {
		return err
	}
	folder, err := layout.Write(temp, empty.Index)
	if err != nil {
		return err
	}
	named := layout.WithAnnotations(map[string]string{
		"org.opencontainers.image.ref.name": tag.TagStr(), // the specification's, and umoci's
		"io.containerd.image.name":          tag.Name(),
	})
	if len(images) == 1 {
		err = folder.AppendImage(images[0], named, layout.WithPlatform(images[0].platform))
	} else {
		err = folder.AppendIndex(index(images), named)
	}
	if err != nil {
		return err
	}
	for _, i := range images {
		file := filepath.Join(temp, i.platform.OS+"-"+i.platform.Architecture)
		if err := tarball.WriteToFile(file+".tar", tag, i.Image); err != nil {
			return err
		}
		if err := os.WriteFile(file+".spdx.json", i.sbom, 0o644); err != nil { //nolint:gosec // it is meant for everybody
			return err
		}
	}
	if err := os.RemoveAll(out); err != nil {
		return err
	}
	return os.Rename(temp, out)
}

func index(images []platformImage) v1.ImageIndex {
	index := v1.ImageIndex(empty.Index)
	for _, i := range images {
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: i, Descriptor: v1.Descriptor{Platform: &i.platform}})
	}
	return index
}

// pushAll writes the images, each with its list of contents as a referrer
// (distribution specification 1.1), and last what the tag names.
func pushAll(ctx context.Context, tag name.Tag, images []platformImage) error {
	pusher, err := remote.NewPusher(remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain))
	if err != nil {
		return err
	}
	for _, i := range images {
		digest, err := i.Digest()
		if err != nil {
			return err
		}
		if err := pusher.Push(ctx, tag.Context().Digest(digest.String()), i); err != nil {
			return err
		}
		list, err := i.referrer()
		if err != nil {
			return err
		}
		if digest, err = list.Digest(); err != nil {
			return err
		}
		if err := pusher.Push(ctx, tag.Context().Digest(digest.String()), list); err != nil {
			return err
		}
	}
	if len(images) == 1 {
		return pusher.Push(ctx, tag, images[0])
	}
	return pusher.Push(ctx, tag, index(images))
}
