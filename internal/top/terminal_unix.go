//go:build unix

package top

import (
	"os"
	"os/signal"
	"syscall"
)

func notifyTerminal(resized, resumed chan<- os.Signal) {
	signal.Notify(resized, syscall.SIGWINCH)
	signal.Notify(resumed, syscall.SIGCONT)
}

// suspend stops the process, as the shell would if the terminal didn't send single
// keys.
func suspend() { _ = syscall.Kill(0, syscall.SIGTSTP) }
