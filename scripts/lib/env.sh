# Sourced by scripts/* and .ci/run: finds a Python, makes the environment, keeps it up to date. Bash 3.2 is enough.
#
#   find_python VERSION   prints a working interpreter of that minor version ("3.12"), or "any" for the preferred one
#   make_env EXTRA [VERSION] [JAX]
#                         installs this project with [EXTRA] into .venv-<version>[-jax<JAX>] at the project root and sets
#                         $ENV_PYTHON. Does nothing if that was done before and pyproject.toml is unchanged.
# $PYTHON names the interpreter to use instead of the preferred one.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
PREFERRED_PYTHONS="3.11 3.12 3.13"

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# Versions are asked of the interpreter itself: a shim can carry the right name and fail, or be another version.
python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
can_make_venv() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

python_candidates() {
  local version="$1" pyenv_root
  command -v "python$version"
  pyenv_root="${PYENV_ROOT:-$(pyenv root 2>/dev/null || printf '%s' "$HOME/.pyenv")}"
  ls -1 "$pyenv_root/versions/$version".*/bin/"python$version" 2>/dev/null
  ls -1 "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}"/cpython-"$version".*/bin/"python$version" 2>/dev/null
  ls -1 "/usr/bin/python$version" "/usr/local/bin/python$version" "/opt/homebrew/bin/python$version" 2>/dev/null
  command -v python3
  command -v python
}

find_python() {
  local wanted="$1" versions="$1" version candidate
  if [ "$wanted" = any ]; then versions="$PREFERRED_PYTHONS"; fi
  for version in $versions; do
    while IFS= read -r candidate; do
      if [ "$(python_version "$candidate")" = "$version" ] && can_make_venv "$candidate"; then
        printf '%s\n' "$candidate"
        return 0
      fi
    done <<CANDIDATES
$(python_candidates "$version")
CANDIDATES
  done
  return 1
}

explain_no_python() {
  local wanted="$1" found version
  for found in "${PYTHON:-}" $(command -v "python$wanted") $(command -v python3); do
    version="$(python_version "$found")" || continue
    case " $PREFERRED_PYTHONS " in
      *" $version "*)
        if ! can_make_venv "$found"; then
          say "  $found is Python $version but lacks the venv module (on Debian and Ubuntu: the package python$version-venv)"
        fi ;;
      *) say "  $found is Python $version; this project runs on $PREFERRED_PYTHONS" ;;
    esac
  done
}

# Runs a command with its output in a log, and says once in a while how far it is.
run_with_progress() {
  local title="$1" log="$2" pid seconds=0 last
  shift 2
  "$@" >"$log" 2>&1 </dev/null &
  pid=$!
  trap 'kill "$pid" 2>/dev/null; exit 130' INT TERM
  while kill -0 "$pid" 2>/dev/null; do
    sleep 1
    seconds=$((seconds + 1))
    last="$(grep -E '^(Collecting|Installing|Building|Processing)' "$log" 2>/dev/null | tail -n 1 | cut -c1-50)"
    if [ -t 2 ]; then
      printf '\r\033[K%s: %3d s  %s' "$title" "$seconds" "$last" >&2
    elif [ $((seconds % 15)) = 0 ]; then
      say "$title: $seconds s  $last"
    fi
  done
  trap - INT TERM
  if [ -t 2 ]; then printf '\r\033[K' >&2; fi
  if wait "$pid"; then
    say "$title: done in $seconds s"
  else
    say "$title: FAILED after $seconds s. The end of its output:"
    tail -n 15 "$log" >&2
    return 1
  fi
}

make_env() {
  local extra="$1" version="${2:-any}" jax="${3:-}" python folder stamp key requirement
  if [ "$version" = any ] && [ -n "${PYTHON:-}" ]; then
    python="$PYTHON"
    version="$(python_version "$python")" || die "PYTHON=$PYTHON does not run"
    case " $PREFERRED_PYTHONS " in
      *" $version "*) ;;
      *) die "PYTHON=$PYTHON is Python $version; this project runs on $PREFERRED_PYTHONS" ;;
    esac
    can_make_venv "$python" || die "PYTHON=$PYTHON lacks the venv module (on Debian and Ubuntu: python$version-venv)"
  elif ! python="$(find_python "$version")"; then
    if [ "$version" = any ]; then version=3; fi
    explain_no_python "$version"
    die "no usable Python $version found; install one or set PYTHON=/path/to/python"
  fi
  version="$(python_version "$python")"
  folder="$ROOT/.venv-$version${jax:+-jax$jax}"
  ENV_PYTHON="$folder/bin/python"
  stamp="$folder/.installed-$extra"
  key="$("$python" -c '
import hashlib, pathlib, sys
root, *rest = sys.argv[1:]
data = pathlib.Path(root, "pyproject.toml").read_bytes()
print(hashlib.sha256(data + repr((sys.version, root, rest)).encode()).hexdigest())' "$ROOT" "$extra" "$jax")" || die "cannot read $ROOT/pyproject.toml"
  if [ "$(cat "$stamp" 2>/dev/null)" = "$key" ] && [ "$(python_version "$ENV_PYTHON")" = "$version" ]; then
    return 0
  fi
  say "environment: ${folder#"$ROOT"/} with $python (log: ${folder#"$ROOT"/}/install.log)"
  if [ "$(python_version "$ENV_PYTHON")" != "$version" ]; then
    "$python" -m venv --clear "$folder" >&2 || die "$python could not make an environment in $folder"
  fi
  rm -f "$stamp"
  requirement="$ROOT"
  if [ -n "$extra" ]; then requirement="$ROOT[$extra]"; fi
  run_with_progress "installing" "$folder/install.log" "$ENV_PYTHON" -m pip install --disable-pip-version-check \
    --progress-bar off -e "$requirement" ${jax:+"jax==$jax"} ||
    die "the packages could not be installed; whole log: $folder/install.log"
  printf '%s\n' "$key" >"$stamp"
}
