// Package crds finds the definitions of the custom resources that the chart makes,
// in the modules of those who define them.
package crds

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// files are by their module.
var files = map[string][]string{
	"github.com/kedacore/keda/v2@v2.21.0": {
		"config/crd/bases/keda.sh_scaledobjects.yaml",
		"config/crd/bases/keda.sh_triggerauthentications.yaml",
	},
	"github.com/prometheus-operator/prometheus-operator@v0.85.0": {
		"example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
		"example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml",
		"example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
	},
}

// Read gives the definitions, in YAML, by their files' names.
func Read() (map[string][]byte, error) {
	all := map[string][]byte{}
	for module, paths := range files {
		dir, err := Module(module)
		if err != nil {
			return nil, err
		}
		for _, path := range paths {
			if all[filepath.Base(path)], err = os.ReadFile(filepath.Join(dir, path)); err != nil {
				return nil, err
			}
		}
	}
	return all, nil
}

// Module is where a module of that version lies, downloaded if need be.
func Module(module string) (string, error) {
	out, err := exec.Command("go", "mod", "download", "-json", module).Output()
	var got struct{ Dir, Error string }
	if jsonErr := json.Unmarshal(out, &got); jsonErr != nil || got.Error != "" || got.Dir == "" {
		return "", fmt.Errorf("download %s: %w %s", module, err, got.Error)
	}
	return got.Dir, nil
}
