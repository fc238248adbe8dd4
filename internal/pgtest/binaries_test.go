package pgtest

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"testing"
)

type answers func(*http.Request) (*http.Response, error)

func (a answers) RoundTrip(r *http.Request) (*http.Response, error) { return a(r) }

func TestDownloadIsMetered(t *testing.T) {
	const size = 3 << 20
	server := answers(func(r *http.Request) (*http.Response, error) {
		n := 64 // a checksum
		if r.URL.Path == "/archive" {
			n = size
		}
		return &http.Response{
			StatusCode: http.StatusOK, ContentLength: int64(n),
			Body: io.NopCloser(bytes.NewReader(make([]byte, n))),
		}, nil
	})
	get := func(path string, progress func(done, total int64) error) (int, error) {
		client := http.Client{Transport: meter{server, progress}}
		answer, err := client.Get("http://127.0.0.1" + path)
		if err != nil {
			return 0, err
		}
		defer answer.Body.Close()
		body, err := io.ReadAll(answer.Body)
		return len(body), err
	}
	var last, calls int64
	count := func(done, total int64) error {
		if total != size || done < last {
			t.Errorf("%d of %d after %d", done, total, last)
		}
		last = done
		calls++
		return nil
	}
	if n, err := get("/archive", count); err != nil || n != size || last != size {
		t.Errorf("read %d, told %d, %v; want %d", n, last, err, size)
	}
	before := calls
	if n, err := get("/checksum", count); err != nil || n != 64 || calls != before {
		t.Errorf("read %d, told %d times, %v", n, calls-before, err)
	}
	enough := errors.New("enough")
	if n, err := get("/archive", func(int64, int64) error { return enough }); !errors.Is(err, enough) || n == size {
		t.Errorf("read %d, %v; want an early end", n, err)
	}
}

func TestCacheFolderOfSomebodyElse(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	if err := os.Chmod(os.TempDir(), 0o755); err != nil {
		t.Fatal(err)
	}
	parent := os.TempDir()
	if ownAccount().switched && !isReachable(parent) {
		t.Skip("the temporary folder isn't open to all, so another would be taken")
	}
	if err := os.Symlink("/", filepath.Join(parent, "link")); err != nil {
		t.Fatal(err)
	}
	if folder, err := cacheFolder("link"); err == nil {
		t.Errorf("a link was taken for our folder: %s", folder)
	}
	if os.Geteuid() == 0 {
		foreign := filepath.Join(parent, "foreign")
		if err := errors.Join(os.Mkdir(foreign, 0o755), os.Chown(foreign, nobody, nobody)); err != nil {
			t.Fatal(err)
		}
		if folder, err := cacheFolder("foreign"); err == nil {
			t.Errorf("somebody else's folder was taken for ours: %s", folder)
		}
	}
	folder, err := cacheFolder("ours")
	if err != nil || folder != filepath.Join(parent, "ours") {
		t.Errorf("got %s, %v", folder, err)
	}
}
