# Starts a command in a container of this host: RUNTIME IMAGE make|look MOUNTS MORE_MOUNTS gpus|no-gpus COMMAND...
#
# Sent to hosts as one line, without these comments: every line ends with `;` or a word after which sh continues reading.
# It becomes the container's client by exec, so that signals reach it. What goes wrong before that is said in a sentence.
runtime=$1; image=$2; make=$3; mounts=$4; more=$5; gpus=$6; shift 6;
host=$(hostname 2>/dev/null || uname -n);
fail() { printf 'manyhosts: %s\n  where: host %s\n  fix:   %s\n' "$1" "$host" "$2" >&2; exit 125; };
set -f;

# Which runtimes run this kind of image.
case $image in
/*|*://*) known="apptainer singularity";;
*) known="docker podman";;
esac;
[ "$runtime" = any ] || known=$runtime;
there=; reasons=; found=; identity=;
for each in $known; do
command -v "$each" >/dev/null 2>&1 && there="$there $each";
done;
[ -n "$there" ] || fail "host $host has no container runtime for the image $image: $(echo $known | sed 's/ / or /g') is not there" "install it there, or name another one with -o container-runtime=";

# Has one of them the image, and what is it known as? An image file by its size and its header, which has a unique id.
format='{{.Architecture}} {{.Id}} {{range .RepoDigests}}{{.}} {{end}}';
for runtime in $there; do
case $image in
/*) [ -e "$image" ] || fail "host $host has no image $image" "copy it there, or keep it in a folder that all hosts share";
found=$runtime;
[ -f "$image" ] && identity=sif:$(wc -c <"$image" | tr -d ' '):$(head -c 32768 "$image" | sha256sum | cut -d ' ' -f 1);
break;;
*://*) found=$runtime; break;;
esac;
if told=$("$runtime" image inspect --format "$format" "$image" 2>/dev/null); then
found=$runtime;
break;
fi;
said=$("$runtime" image inspect "$image" 2>&1 >/dev/null | tail -n 1);
reasons="$reasons${reasons:+; }$runtime: $said";
done;
if [ -z "$found" ]; then
case $reasons in
*"o such image"*|*"not known"*) set -- $there; runtime=$1; fail "host $host has no image $image ($reasons)" "\`$runtime pull $image\` there; a run pulls no images, so that all hosts have the one that you chose";;
*) fail "the container runtime of host $host does not answer ($reasons)" "see what \`$runtime ps\` says there: it must run, and you must be let use it";;
esac;
fi;
if [ -z "$identity" ] && [ -n "$told" ]; then
for word in $told; do
case $word in
*@*) identity="$identity ${word##*@}";;
sha256:*) identity="$identity $word";;
*) if [ ${#word} = 64 ]; then identity="$identity sha256:$word"; else made_for=$word; fi;;
esac;
done;
case $(uname -m) in x86_64) mine=amd64;; aarch64) mine=arm64;; *) mine=$made_for;; esac;
[ "$made_for" = "$mine" ] || fail "the image $image on host $host is built for processors of the kind $made_for, and the host has $mine" "pull it for that kind: \`$runtime pull --platform linux/$mine $image\`";
fi;
runtime=$found;

# What is mounted. A runtime would make folders that are not there, as root; a look leaves none behind.
nearest() { path=$1; until [ -z "$path" ] || [ -e "$path" ]; do path=${path%/*}; done; [ -z "$path" ] || echo "$path:$path"; };
folder=${mounts%%:*}; bound=;
IFS=,;
for each in $mounts; do
place=${each%%:*};
if [ "$make" = make ]; then
mkdir -p "$place" || fail "host $host cannot make the folder $place" "the same folder is used on all hosts: start from one that you may write to everywhere";
else
each=$(nearest "$place");
fi;
case ",$bound,," in *",$each,"*) ;; *) bound="$bound${bound:+,}$each";; esac;
done;
for each in $more; do
[ -e "${each%%:*}" ] || fail "host $host has no ${each%%:*}, which the container is to see" "see -o container-mounts=, and whether that is mounted there";
bound="$bound${bound:+,}$each";
done;
unset IFS;
[ "$make" = make ] || folder=/;
devices=no;
if [ "$gpus" = gpus ] && { [ -e /dev/nvidiactl ] || [ -e /dev/dxg ]; }; then devices=yes; fi;

# Apptainer passes the environment on and mounts the home directory, whose Python packages are not those of the image.
MANYHOSTS_IMAGE="$runtime $identity"; export MANYHOSTS_IMAGE;
case $runtime in
apptainer|singularity)
unset PYTHONPATH PYTHONHOME;
PYTHONNOUSERSITE=1; export PYTHONNOUSERSITE;
set -- --pwd "$folder" "$image" "$@";
[ -z "$bound" ] || set -- --bind "$bound" "$@";
[ $devices = no ] || set -- --nv "$@";
exec "$runtime" --silent exec "$@";;
esac;

# Docker and Podman. Variables go by name, so that no value is in a command line.
set -- "$image" "$@";
IFS=,;
for each in $bound; do set -- --volume "$each" "$@"; done;
unset IFS;
[ -f /etc/machine-id ] && set -- --volume /etc/machine-id:/etc/machine-id:ro "$@";
for each in $(env | sed -nE 's/^((MANYHOSTS|NCCL|GLOO|OMP|MKL|CUDA|TORCH|PYTORCH)_[A-Za-z0-9_]*)=.*/\1/p'); do
set -- --env "$each" "$@";
done;
USER=${USER:-$(id -un)}; LOGNAME=$USER; export USER LOGNAME;
user=$(id -u):$(id -g); kind=docker; is_root=no;
case $("$runtime" --version 2>/dev/null) in podman*) kind=podman;; esac;
case $kind in
podman)
if [ "$(id -u)" = 0 ]; then is_root=yes; else set -- --userns keep-id "$@"; fi;
[ $devices = no ] || set -- --device nvidia.com/gpu=all "$@";;
docker)
case $("$runtime" info --format '{{json .SecurityOptions}}' 2>/dev/null) in
*name=rootless*) user=0:0;;
*name=userns*) is_root=yes; set -- --userns host "$@";;
*) is_root=yes;;
esac;
for each in $(id -G); do set -- --group-add "$each" "$@"; done;
[ $devices = no ] || set -- --gpus all "$@";;
esac;
if [ -d /dev/infiniband ]; then
set -- --device /dev/infiniband "$@";
[ $is_root = no ] || set -- --ulimit memlock=-1 "$@";
fi;
run=${mounts##*:};
set -- run --rm --interactive --pull never --network host --ipc host --pid host --user "$user" --entrypoint "" --log-driver none --label "manyhosts.run=${run##*/}" --workdir "$folder" --env HOME=/tmp --env USER --env LOGNAME "$@";
exec "$runtime" "$@"
