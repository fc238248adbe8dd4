package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"strings"
	"time"

	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx/v2/common"
	spdx "github.com/spdx/tools-golang/spdx/v2/v2_3"
	"golang.org/x/crypto/x509roots/fallback/bundle"
)

// authorities are those that Mozilla trusts, as Go's maintainers publish them.
// Those that are trusted with a condition, such as "until a date", are left out:
// a file can't say it.
func authorities() ([]byte, error) {
	var out bytes.Buffer
	for root := range bundle.Roots() {
		if root.Constraint != nil {
			continue
		}
		if err := pem.Encode(&out, &pem.Block{Type: "CERTIFICATE", Bytes: root.Certificate}); err != nil {
			return nil, err
		}
	}
	if out.Len() == 0 {
		return nil, errors.New("there are no certificate authorities")
	}
	return out.Bytes(), nil
}

// rootsModule is where they come from.
const rootsModule = "golang.org/x/crypto/x509roots/fallback"

// modules are what an image is made of, without dedupd itself; the standard
// library is the first.
type modules []module

type module struct {
	path, version string
	texts         map[string][]byte // its licence, and what it wants to be told with it
}

// licences are all modules' texts, by the path of the file.
func (m modules) licences() map[string][]byte {
	all := map[string][]byte{}
	for _, m := range m {
		for name, text := range m.texts {
			all[path.Join(m.path, name)] = text
		}
	}
	return all
}

// readModules finds what a binary says that it was built from in the cache of
// modules, to which the go command brings what is missing.
func readModules(ctx context.Context, info *buildinfo.BuildInfo) (modules, error) {
	args := []string{"mod", "download", "-json"}
	for _, m := range append(info.Deps, rootsVersion()) {
		if m.Replace != nil {
			m = m.Replace
		}
		if m.Version == "" {
			return nil, fmt.Errorf("it is built with the folder %s in place of a module, which nobody else has", m.Path)
		}
		args = append(args, m.Path+"@"+m.Version)
	}
	command := exec.CommandContext(ctx, "go", args...)
	command.Stderr = os.Stderr
	listing, err := command.Output()
	if err != nil {
		return nil, fmt.Errorf("go mod download: %w", err)
	}
	root, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return nil, fmt.Errorf("go env GOROOT: %w", err)
	}
	texts, err := readLicence(strings.TrimSpace(string(root)))
	if err != nil {
		return nil, err
	}
	all := modules{{"stdlib", strings.TrimPrefix(info.GoVersion, "go"), texts}}
	for decoder := json.NewDecoder(bytes.NewReader(listing)); ; {
		var m struct{ Path, Version, Dir string }
		if err := decoder.Decode(&m); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, err
		}
		if texts, err = readLicence(m.Dir); err != nil {
			return nil, err
		}
		all = append(all, module{m.Path, m.Version, texts})
	}
}

// rootsVersion is the module of the certificate authorities, at the version that is
// built into this program.
func rootsVersion() *debug.Module {
	info, _ := debug.ReadBuildInfo()
	for _, m := range info.Deps {
		if m.Path == rootsModule {
			return m
		}
	}
	return &debug.Module{Path: rootsModule}
}

var licenceName = regexp.MustCompile(`(?i)^(licen[cs]e|copying|notice|patents)([.-].*)?$`)

// readLicence reads the texts at the top of a module.
func readLicence(dir string) (map[string][]byte, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	texts := map[string][]byte{}
	for _, e := range entries {
		if e.Type().IsRegular() && licenceName.MatchString(e.Name()) {
			if texts[e.Name()], err = os.ReadFile(filepath.Join(dir, e.Name())); err != nil {
				return nil, err
			}
		}
	}
	if len(texts) == 0 {
		return nil, fmt.Errorf("%s has no licence", dir)
	}
	return texts, nil
}

// sbom lists what is in the image, in the form of SPDX 2.3.
func (b *binary) sbom(contents modules) ([]byte, error) {
	executable, err := os.ReadFile(b.path)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(executable)
	digest := hex.EncodeToString(sum[:])
	main := listed("dedupd", b.info.Main.Path, b.version)
	main.PackageFileName = "/usr/bin/dedupd"
	main.PackageChecksums = []common.Checksum{{Algorithm: common.SHA256, Value: digest}}
	document := &spdx.Document{
		SPDXVersion: spdx.Version, DataLicense: spdx.DataLicense, SPDXIdentifier: "DOCUMENT",
		DocumentName:      "dedupd " + b.version + " " + b.platform.String(),
		DocumentNamespace: "https://" + b.info.Main.Path + "/sbom/" + digest,
		CreationInfo: &spdx.CreationInfo{
			Created:  b.created.Format(time.RFC3339),
			Creators: []common.Creator{{CreatorType: "Tool", Creator: "dedupd-deploy-image"}},
		},
		Packages:      []*spdx.Package{main},
		Relationships: []*spdx.Relationship{related("DOCUMENT", "DESCRIBES", "dedupd")},
	}
	for i, m := range contents {
		id := fmt.Sprintf("module-%d", i)
		relation := "DEPENDS_ON"
		if m.path == rootsModule {
			relation = "CONTAINS"
		}
		document.Packages = append(document.Packages, listed(id, m.path, m.version))
		document.Relationships = append(document.Relationships, related("dedupd", relation, id))
	}
	var out bytes.Buffer
	err = spdxjson.Write(document, &out, spdxjson.Indent(" "))
	return out.Bytes(), err
}

func listed(id, name, version string) *spdx.Package {
	return &spdx.Package{
		PackageSPDXIdentifier: common.ElementID(id), PackageName: name, PackageVersion: version,
		PackageDownloadLocation: "NOASSERTION", PackageLicenseConcluded: "NOASSERTION", PackageLicenseDeclared: "NOASSERTION", PackageCopyrightText: "NOASSERTION",
		PackageExternalReferences: []*spdx.PackageExternalReference{{
			Category: "PACKAGE-MANAGER", RefType: "purl", Locator: "pkg:golang/" + name + "@" + version,
		}},
	}
}

func related(from, how, to string) *spdx.Relationship {
	return &spdx.Relationship{
		RefA: common.DocElementID{ElementRefID: common.ElementID(from)}, Relationship: how,
		RefB: common.DocElementID{ElementRefID: common.ElementID(to)},
	}
}
