package app

import (
	"runtime"
	"runtime/debug"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dedupd/dedupd/sinks"
)

// release is set by the linker for releases. Other builds take their version from
// the build info.
var release string

// Build says what this binary was built from.
type Build struct {
	Version  string   `json:"version"`
	Revision string   `json:"revision"` // of the checkout; empty: not known
	Modified bool     `json:"modified"` // the checkout had changes
	Time     string   `json:"time"`     // of the revision
	Go       string   `json:"go"`
	Platform string   `json:"platform"`
	Sinks    []string `json:"sinks"` // the kinds this binary has
}

// ReadBuild describes this binary.
func ReadBuild() Build {
	b := Build{Version: release, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH, Sinks: sinks.Default.Kinds()}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	if b.Version == "" {
		b.Version = info.Main.Version
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Revision = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		case "vcs.time":
			b.Time = s.Value
		}
	}
	return b
}

func registerBuildInfo(reg prometheus.Registerer) {
	b := ReadBuild()
	g := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "dedupd_build_info", Help: "Which build this is; always 1.",
		ConstLabels: prometheus.Labels{"version": b.Version, "revision": b.Revision, "go": b.Go},
	})
	g.Set(1)
	reg.MustRegister(g)
}
