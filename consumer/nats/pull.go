package nats

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// The library's Fetch tells messages from the server's status replies by their headers
// alone: for it, a message without payload and with a header "Status" isn't of the
// stream, and is never read, or fails each pull that it comes with; and a header
// "Nats-Pin-Id" goes into all later pulls, which the server then refuses. Any producer
// may set those headers. So we pull ourselves: a message of the stream says where its
// acknowledgement goes, and a status reply doesn't.

// ackPrefix begins the subjects to which messages of a stream are acknowledged.
const ackPrefix = "$JS.ACK."

// The status replies that end a pull as it should.
const (
	statusIdle      = "100"
	statusNone      = "404"
	statusTimeout   = "408"
	statusConflict  = "409"
	completed       = "Batch Completed"
	tooLargeForPull = "Message Size Exceeds MaxBytes"
	consumerDeleted = "Consumer Deleted"
)

// pull is what one fetch asks for.
type pull struct {
	messages int
	bytes    int64 // 0: any number
	wait     time.Duration
}

// request is the pull as the server reads it.
func (p pull) request() ([]byte, error) {
	return json.Marshal(struct {
		Expires  time.Duration `json:"expires"`
		Batch    int           `json:"batch"`
		MaxBytes int64         `json:"max_bytes,omitempty"`
	}{p.wait, p.messages, p.bytes})
}

// receive asks for messages and hands each on as it comes, until the server has no more
// for this pull, or doesn't answer. The error is the server's.
func (x *session) receive(p pull, each func(*natsgo.Msg) error) error {
	request, err := p.request()
	if err != nil {
		return err
	}
	came := make(chan *natsgo.Msg, 2*p.messages) // and status replies
	inbox := x.conn.NewInbox()
	sub, err := x.conn.ChanSubscribe(inbox, came)
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }() // it fails where the connection is closed
	c := x.source.config
	if err := x.conn.PublishRequest("$JS.API.CONSUMER.MSG.NEXT."+c.Stream+"."+c.Durable, inbox, request); err != nil {
		return err
	}
	patience := time.NewTimer(p.wait + unanswered)
	defer patience.Stop()
	bytes := int64(0)
	for n := 0; n < p.messages && (p.bytes == 0 || bytes < p.bytes); {
		select {
		case msg := <-came:
			if !strings.HasPrefix(msg.Reply, ackPrefix) {
				if done, err := ended(msg.Header.Get("Status"), msg.Header.Get("Description")); done {
					return err
				}
				continue
			}
			n++
			bytes += int64(msg.Size())
			if err := each(msg); err != nil {
				return err
			}
			patience.Reset(p.wait + unanswered)
		case <-patience.C:
			return nil
		}
	}
	return nil
}

// ended tells what a status reply means. A conflict has many reasons, which only its
// description tells apart.
func ended(status, description string) (done bool, err error) {
	switch status {
	case statusIdle:
		return false, nil
	case statusNone, statusTimeout:
		return true, nil
	case statusConflict:
		switch description {
		case completed, tooLargeForPull:
			return true, nil
		case consumerDeleted:
			return true, jetstream.ErrConsumerDeleted
		}
	}
	return true, fmt.Errorf("the server answers %s %s", status, description)
}

// lostHeaders reports whether the library could not parse a message's headers, such as a
// line without a colon. The server checks nothing of it, and the library hands the
// message on without any header. Its size is that of the whole message.
func lostHeaders(msg *natsgo.Msg) bool {
	return msg.Header == nil && msg.Size() > len(msg.Subject)+len(msg.Reply)+len(msg.Data)
}
