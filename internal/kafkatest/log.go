package kafkatest

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
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

// SavedEnd is the position behind the last record of a log that SaveLog has copied. By the
// time that a broker which has started again can be asked for it, producers have gone on.
func SavedEnd(folder string) (int64, error) {
	segments, err := filepath.Glob(filepath.Join(folder, "*.log"))
	if err != nil || len(segments) == 0 {
		return 0, fmt.Errorf("no segment in %s: %w", folder, cmp.Or(err, os.ErrNotExist))
	}
	last := slices.Max(segments) // a segment is named by its first position, with leading zeros
	end, err := strconv.ParseInt(strings.TrimSuffix(filepath.Base(last), ".log"), 10, 64)
	if err != nil {
		return 0, err
	}
	data, err := os.ReadFile(last)
	if err != nil {
		return 0, err
	}
	// A batch begins with its base offset and the length of what follows; the delta of its
	// last offset is at 23 (Kafka's record batch, magic 2).
	const head, delta = 12, 23
	for len(data) >= delta+4 {
		size := head + int(binary.BigEndian.Uint32(data[8:]))
		if size <= head || size > len(data) {
			break
		}
		end = int64(binary.BigEndian.Uint64(data)) + int64(binary.BigEndian.Uint32(data[delta:])) + 1
		data = data[size:]
	}
	return end, nil
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
