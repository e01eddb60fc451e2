# Options and steps of the scripts beside this file, which read it with `source`.
#
# A script sets WHAT, and calls `step TITLE ESTIMATE RESULT COMMAND…` for each command. A step whose RESULT (a file or
# folder below the work folder) is there counts as done, so a stopped script continues when it is started again.

set -euo pipefail

SAMPLE=no
DRY=no
D=""
for word in "$@"; do
  case "$word" in
    --sample) SAMPLE=yes ;;
    --dry-run) DRY=yes ;;
    -*) echo "unknown option $word: use --sample, --dry-run or both, and a folder" >&2; exit 2 ;;
    *) D="$word" ;;
  esac
done
if [ -z "$D" ]; then
  echo "usage: bash recipes/papers/$(basename "$0") [--sample] [--dry-run] FOLDER" >&2
  exit 2
fi
if [ ! -d recipes/papers ]; then
  echo "start it in the clone's folder, which holds recipes/" >&2
  exit 2
fi
STARTED=$SECONDS
NUMBER=0

# A command as a shell reads it: words with spaces stand between quotation marks.
shown() {
  local word
  for word in "$@"; do
    case "$word" in
      *" "*) printf "'%s' " "$word" ;;
      *) printf '%s ' "$word" ;;
    esac
  done
}

step() {
  local title="$1" estimate="$2" result="$3"
  shift 3
  NUMBER=$((NUMBER + 1))
  if [ "$DRY" = yes ]; then
    local words
    words=$(shown "$@")
    printf '# %d. %s: %s\n%s\n' "$NUMBER" "$title" "$estimate" "${words% }"
    return
  fi
  printf '\n[%d, %d:%02d] %s\n  $ %s\n' "$NUMBER" $(((SECONDS - STARTED) / 60)) $(((SECONDS - STARTED) % 60)) "$title" "$(shown "$@")"
  if [ -n "$result" ] && [ -e "$D/$result" ]; then
    echo "  done before"
    return
  fi
  "$@"
}

begin() {
  if [ "$DRY" = yes ]; then
    echo "# $WHAT"
  elif [ "$SAMPLE" = yes ]; then
    echo "$WHAT"
    echo "SAMPLE: every command runs, on a made-up world of a few questions and with SmolLM2-135M after a few steps of"
    echo "training in the 7B model's place. The scores say nothing about the paper."
  fi
}

end() {
  if [ "$DRY" = no ]; then
    printf '\ndone after %d:%02d\n' $(((SECONDS - STARTED) / 60)) $(((SECONDS - STARTED) % 60))
  fi
}
