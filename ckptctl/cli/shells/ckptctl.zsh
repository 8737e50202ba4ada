#compdef ckptctl
# zsh completion of ckptctl: put this file into a folder of $fpath as _ckptctl.
_ckptctl() {
    local word about
    local -a found
    while IFS=$'\t' read -r word about; do
        # A colon would end the candidate.
        found+=("${word//:/\\:}${about:+:$about}")
    done < <(_CKPTCTL_COMPLETE=1 "${words[1]}" "${(@)words[2,CURRENT]}" 2>/dev/null)
    if (( ${#found} )); then
        _describe -V ckptctl found
    else
        _files
    fi
}
if [[ ${funcstack[1]} == _ckptctl ]]; then
    _ckptctl "$@"
else
    compdef _ckptctl ckptctl
fi
