# fish completion of ckptctl: put this file into a folder of $fish_complete_path.
function __ckptctl_candidates
    set -l word (commandline --current-token --cut-at-cursor)
    set -l words (commandline --tokenize --cut-at-cursor) $word
    set -l found (_CKPTCTL_COMPLETE=1 $words[1] $words[2..-1] 2>/dev/null)
    if set -q found[1]
        printf '%s\n' $found
    else
        __fish_complete_path $word
    end
end
complete --command ckptctl --no-files --keep-order --arguments '(__ckptctl_candidates)'
