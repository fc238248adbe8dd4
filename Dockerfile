# The container image, for those who build with Docker:
#
#     docker build --build-arg VERSION=$(git describe --tags --always) -t dedupd .
#
# `make image` makes the same without a daemon, reproducibly, and with a list of
# what is in it. A test keeps both in step.
FROM --platform=$BUILDPLATFORM golang:1.26-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG TARGETOS TARGETARCH VERSION=dev
RUN CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH GOFLAGS=-buildvcs=false make build VERSION=$VERSION BIN=/out
RUN mkdir -p /root-fs/etc/dedupd /root-fs/etc/ssl/certs /root-fs/usr/bin /root-fs/usr/share/licenses/github.com/dedupd/dedupd \
 && printf 'root:x:0:0:root:/:/sbin/nologin\ndedupd:x:65532:65532:dedupd:/:/sbin/nologin\n' > /root-fs/etc/passwd \
 && printf 'root:x:0:\ndedupd:x:65532:\n' > /root-fs/etc/group \
 && cp /etc/ssl/certs/ca-certificates.crt /root-fs/etc/ssl/certs/ \
 && cp LICENSE /root-fs/usr/share/licenses/github.com/dedupd/dedupd/ \
 && cp /out/dedupd /root-fs/usr/bin/

FROM scratch
COPY --from=build /root-fs/ /
USER 65532:65532
# The loopback of a container is nobody's.
ENV DEDUPD_HTTP_LISTEN=:9464
EXPOSE 9464/tcp
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/bin/dedupd"]
CMD ["run", "-c", "/etc/dedupd/dedupd.yaml"]
