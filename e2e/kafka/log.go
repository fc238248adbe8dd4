package kafka

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// SaveLog copies the log of a partition, with its leader epochs and its producers'
// state, to a folder that doesn't exist. The broker must be stopped.
func (b *Broker) SaveLog(topic string, partition int32, to string) error {
	log, err := b.stoppedLog(topic, partition)
	if err != nil {
		return err
	}
	return os.CopyFS(to, os.DirFS(log))
}

// CutLog puts an older copy of a partition's log back, which SaveLog has made: what
// came after it is gone, as after the loss of a disk, or after an election of a
// replica that had lagged behind. The broker must be stopped.
func (b *Broker) CutLog(topic string, partition int32, from string) error {
	log, err := b.stoppedLog(topic, partition)
	if err != nil {
		return err
	}
	if err := os.RemoveAll(log); err != nil {
		return err
	}
	if err := os.CopyFS(log, os.DirFS(from)); err != nil {
		return err
	}
	// What the broker remembers of the log beside it would reach beyond its end.
	checkpoints, err := filepath.Glob(filepath.Join(filepath.Dir(log), "*-offset-checkpoint"))
	if err != nil {
		return err
	}
	for _, c := range checkpoints {
		if err := forgetLog(c, topic, partition); err != nil {
			return err
		}
	}
	return nil
}

func (b *Broker) stoppedLog(topic string, partition int32) (string, error) {
	if b.dir == "" {
		return "", errNotOurs
	}
	if b.proc != nil {
		return "", errors.New("kafka is running")
	}
	log := filepath.Join(b.dir, "data", fmt.Sprint(topic, "-", partition))
	_, err := os.Stat(log)
	return log, err
}

// forgetLog takes a partition's line out of a checkpoint: a version, the number of
// lines, and the lines.
func forgetLog(checkpoint, topic string, partition int32) error {
	text, err := os.ReadFile(checkpoint)
	if err != nil {
		return err
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	if len(lines) < 2 { // nothing was written to it yet
		return nil
	}
	kept := []string{}
	for _, line := range lines[2:] {
		if !strings.HasPrefix(line, fmt.Sprint(topic, " ", partition, " ")) {
			kept = append(kept, line)
		}
	}
	head := []string{lines[0], fmt.Sprint(len(kept))}
	return os.WriteFile(checkpoint, []byte(strings.Join(append(head, kept...), "\n")+"\n"), 0o644)
}
