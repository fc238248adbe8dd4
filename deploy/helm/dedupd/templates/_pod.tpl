{{/*
The spec of a pod, worker or one-shot:
  root           the chart
  args           of the container
  configMap      that holds dedupd.yaml
  worker         true: with ports, probes and all that a worker has
  serviceAccount its name
  databaseURL    {name, key} instead of secrets.database.url
*/}}
{{- define "dedupd.podSpec" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $worker := .worker -}}
{{- $files := (include "dedupd.files" $root | fromYaml).files | default list -}}
{{- with .databaseURL -}}
{{- $others := list -}}
{{- range $files }}{{ if ne .path "database/url" }}{{ $others = append $others . }}{{ end }}{{ end -}}
{{- $files = append $others (dict "name" .name "key" (.key | default "url") "path" "database/url") -}}
{{- end -}}
serviceAccountName: {{ .serviceAccount }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with include "dedupd.pullSecrets" $root }}
imagePullSecrets:
  {{- . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml $values.podSecurityContext | nindent 2 }}
{{- if $worker }}
terminationGracePeriodSeconds: {{ int64 $values.terminationGracePeriodSeconds }}
{{- else }}
restartPolicy: Never
{{- end }}
{{- range $key := list "priorityClassName" "runtimeClassName" "dnsPolicy" }}
{{- with get $values $key }}
{{ $key }}: {{ . }}
{{- end }}
{{- end }}
{{- range $key := list "dnsConfig" "hostAliases" "nodeSelector" "tolerations" "affinity" }}
{{- with get $values $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- if $worker }}
{{- if $values.topologySpread.enabled }}
topologySpreadConstraints:
  {{- with $values.topologySpread.constraints }}
  {{- toYaml . | nindent 2 }}
  {{- else }}
  {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - topologyKey: {{ . }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "dedupd.selectorLabels" $root | nindent 8 }}
    matchLabelKeys: [pod-template-hash]
  {{- end }}
  {{- end }}
{{- end }}
{{- with $values.initContainers }}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
containers:
  - name: dedupd
    image: {{ include "dedupd.image" $root }}
    imagePullPolicy: {{ $values.image.pullPolicy }}
    args:
      {{- toYaml .args | nindent 6 }}
    env:
      {{- include "dedupd.env" $root | nindent 6 }}
    {{- with $values.extraEnvFrom }}
    envFrom:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- if $worker }}
    ports:
      - name: http
        containerPort: {{ $values.port }}
        protocol: TCP
    {{- range $probe, $path := dict "startupProbe" "/startupz" "livenessProbe" "/livez" "readinessProbe" "/readyz" }}
    {{- $spec := get $values $probe }}
    {{- if $spec.enabled }}
    {{- $own := omit $spec "enabled" }}
    {{- if not (or $own.exec $own.tcpSocket $own.grpc $own.httpGet) }}
    {{- $own = merge $own (dict "httpGet" (dict "path" $path "port" "http")) }}
    {{- end }}
    {{ $probe }}:
      {{- toYaml $own | nindent 6 }}
    {{- end }}
    {{- end }}
    {{- with $values.lifecycle }}
    lifecycle:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- end }}
    {{- with $values.resources }}
    resources:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    securityContext:
      {{- toYaml $values.securityContext | nindent 6 }}
    volumeMounts:
      - name: config
        mountPath: /etc/dedupd/config
        readOnly: true
      {{- if $files }}
      - name: secrets
        mountPath: {{ include "dedupd.secretsPath" $root }}
        readOnly: true
      {{- end }}
      {{- with $values.extraVolumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
  {{- if $worker }}
  {{- with $values.extraContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- end }}
volumes:
  - name: config
    configMap:
      name: {{ .configMap }}
  {{- if $files }}
  # Whole folders, without subPath: a Secret that changes is there without a restart.
  - name: secrets
    projected:
      defaultMode: 288 # 0440: the pod's group reads them
      sources:
        {{- range $files }}
        - secret:
            name: {{ .name }}
            items:
              - key: {{ .key }}
                path: {{ .path }}
        {{- end }}
  {{- end }}
  {{- with $values.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* metadata of a pod template: (dict "root" $ "component" "worker" "config" "…"). */}}
{{- define "dedupd.podMetadata" -}}
{{- $root := .root -}}
{{- $labels := include "dedupd.instanceLabels" $root | fromYaml -}}
{{- $_ := set $labels "app.kubernetes.io/component" .component -}}
{{- $labels = merge $labels $root.Values.podLabels $root.Values.labels -}}
{{- $annotations := deepCopy $root.Values.podAnnotations -}}
{{- with .config }}{{ $_ := set $annotations "checksum/config" (sha256sum .) }}{{ end -}}
labels:
  {{- toYaml $labels | nindent 2 }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
