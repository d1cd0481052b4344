#!/usr/bin/env bash
# Makes the pictures of docs/images that show programs at work, in minutes:
#
#     docs/screenshots/make.sh                 # all of them
#     docs/screenshots/make.sh doctor explain  # some: learner, finder, explain, samples, doctor, notebook
#
# Needs the programs of `brigade-cli`, `learner` and `complete` in target/debug (or in the folder PROGRAMS), tmux,
# chromium, pngquant, and a python3 with nbconvert and ipykernel (or PYTHON). Runs in namespaces of its own, so that no
# name or folder of this machine is in a picture: the host is gpu-box, the project in /mnt/woof.
set -euo pipefail

if [ "${1:-}" != --inside ]; then
    kinds=(--uts --mount)
    [ "$(id -u)" = 0 ] || kinds+=(--map-root-user)
    exec unshare "${kinds[@]}" "$0" --inside "$@"
fi
shift
wanted=${*:-learner finder explain samples doctor notebook}

here=$(dirname "$(readlink -f "$0")")
root=$(dirname "$(dirname "$here")")
images=$root/docs/images
programs=$(readlink -m "${PROGRAMS:-$root/target/debug}")
python=${PYTHON:-python3}
libtorch=$(sed -n 's/^LIBTORCH = "\(.*\)"/\1/p' "$root/.cargo/libtorch.toml")
for program in brigade learn_imagewoof learn_pets complete; do
    [ -x "$programs/$program" ] || { echo "$programs has no program $program: build it first" >&2; exit 1; }
done
for program in tmux chromium pngquant; do
    command -v "$program" > /dev/null || { echo "$program is not installed" >&2; exit 1; }
done

hostname gpu-box
mount -t tmpfs none /mnt
mount -t tmpfs none /opt
mkdir -p /mnt/home /mnt/woof/target /opt/libtorch
mount --bind "$libtorch" /opt/libtorch
ln -s "$programs" /mnt/woof/target/debug
# A laptop's or server's usual line, a kernel without its builder's name, and no other program's messages.
printf '127.0.0.1 localhost\n127.0.1.1 gpu-box\n' > /opt/hosts
uname -r | sed 's/-.*//' > /opt/osrelease
mount --bind /opt/hosts /etc/hosts
mount --bind /opt/osrelease /proc/sys/kernel/osrelease
mount --bind /dev/null /dev/kmsg
export HOME=/mnt/home PATH=$programs:$PATH OMP_NUM_THREADS=1 PYTHONPATH=$root/python LC_ALL=C.UTF-8
export TMUX_TMPDIR=/opt JUPYTER_PLATFORM_DIRS=1 PYTHONWARNINGS=ignore
unset LIBTORCH HISTFILE PROMPT_COMMAND "${!BRIGADE_@}"
printf 'PS1="$ "\nclear\n' > /mnt/home/.bashrc
cd /mnt/woof

terminals() { tmux -L brigade-screenshots -f /dev/null "$@"; }
trap 'terminals kill-server 2> /dev/null || true' EXIT

# Opens a terminal: name, columns, lines.
terminal() {
    terminals new-session -d -s "$1" -x "$2" -y "$3" "bash -i"
    terminals set -g status off
    wait_for "$1" '^\$'
}

# Types a command into a terminal: name, command.
typed() { terminals send-keys -t "$1" "$2" Enter; }

# Waits until a terminal shows a line: name, regular expression.
wait_for() {
    local _
    for _ in $(seq 9000); do
        if terminals capture-pane -p -t "$1" | grep -qE "$2"; then return; fi
        sleep 0.2
    done
    echo "the terminal $1 never showed $2:" >&2
    terminals capture-pane -p -t "$1" >&2
    exit 1
}

# Saves a terminal as a picture: name, title, file.
saved() {
    terminals capture-pane -e -p -t "$1" > /opt/screen
    python3 "$here/terminal.py" "$2" < /opt/screen > "$images/$3"
}

# Saves the upper part of a page as a picture 1,400 pixels wide: page, lines of pixels, file.
page() {
    chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --force-device-scale-factor=1.1 \
        --virtual-time-budget=5000 --window-size="1273,$2" --screenshot=/opt/page.png "file://$1" 2> /dev/null
    smaller /opt/page.png "$3"
}

smaller() { pngquant --quality 60-90 --speed 1 --strip --force --output "$images/$2" "$1"; }

for picture in $wanted; do
    case $picture in
    learner)
        terminal train 112 16
        terminal watch 138 32
        typed train "brigade launch --nproc 2 target/debug/learn_imagewoof --generate 6 64 --size 48 --batch-size 8 \
--mixup 0 --epochs 10 --log woof --plots pictures"
        typed watch "brigade watch runs --wait"
        wait_for train 'epoch 9/10 train: [0-9]+/[0-9]+ \([4-9][0-9] %'
        saved train "A Learner on two processes" learner.svg
        saved watch "brigade watch runs" watch.svg
        wait_for train '^\$ *$'
        brigade report runs/woof.jsonl --monitor accuracy --output /opt/woof.html
        page /opt/woof.html 1265 report.png
        smaller pictures/confusion.png confusion-matrix.png
        ;;
    finder)
        learn_pets --generate 5 60 --size 64 --batch-size 20 --finder-steps 60 --epochs 1 --plots pictures
        smaller pictures/lr_find.png learning-rate-finder.png
        ;;
    explain)
        brigade explain schedule one-cycle --max-lr 0.3 --steps 41 --plot "$images/one-cycle.svg"
        ;;
    samples)
        [ -d data ] || learn_imagewoof --generate 6 64 --size 32 --epochs 1
        brigade data show data/photos-6x64 --transforms random-resized-crop=160,flip,rand-augment --rows 2 \
            --output /opt/samples.png
        smaller /opt/samples.png samples.png
        ;;
    doctor)
        terminal doctor 104 40
        export LIBTORCH=/opt/libtorch
        typed doctor "export LIBTORCH=/opt/libtorch NCCL_SOCKET_IFNAMES=eth0; clear"
        sleep 1
        typed doctor "brigade doctor"
        wait_for doctor 'a job can'
        saved doctor "brigade doctor" doctor.svg
        ;;
    notebook)
        cp "$here/digits.ipynb" .
        "$python" -m nbconvert --log-level ERROR --to html --execute digits.ipynb
        page /mnt/woof/digits.html 945 notebook.png
        ;;
    *)
        echo "there is no picture $picture" >&2
        exit 1
        ;;
    esac
done
ls -l "$images"
