package kafkatest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// LibsEnv names the environment variable with the folder of the broker's jars.
// Without it, it is .cache/kafka-4.1.0-libs at the root of the repository.
const LibsEnv = "DEDUPD_KAFKA_LIBS"

// findKafka finds the Java runtime and the folder with the broker's jars.
func findKafka() (java, libs string, err error) {
	java, err = exec.LookPath("java")
	if err != nil {
		return "", "", errors.New("no java found, which the Kafka broker of the tests needs: install a Java runtime 17 or later, or name a running broker with " + AddrEnv)
	}
	libs = os.Getenv(LibsEnv)
	if libs == "" {
		root, err := repository()
		if err != nil {
			return "", "", err
		}
		libs = filepath.Join(root, ".cache", "kafka-4.1.0-libs")
	}
	if jars, _ := filepath.Glob(filepath.Join(libs, "kafka_2.13-*.jar")); len(jars) == 0 {
		return "", "", fmt.Errorf("no Kafka in %s: run `make kafka`, which fetches its jars with Maven, or name their folder with %s or a running broker with %s", libs, LibsEnv, AddrEnv)
	}
	return java, libs, nil
}

// repository walks up from the working directory, which for a test is its
// package's folder, to the one with go.mod.
func repository() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", fmt.Errorf("no go.mod above the working directory: name the folder of Kafka's jars with %s", LibsEnv)
		}
		dir = parent
	}
}
