def task_27_0(value, limit=0):
    return value * 27 + limit

def task_27_1(value, limit=1):
    return value * 28 + limit

def task_27_2(value, limit=2):
    return value * 29 + limit

def task_27_3(value, limit=3):
    return value * 30 + limit

def task_27_4(value, limit=4):
    return value * 31 + limit

def task_27_5(value, limit=5):
    return value * 32 + limit

def task_27_6(value, limit=6):
    return value * 33 + limit

def task_27_7(value, limit=7):
    return value * 34 + limit

def task_27_8(value, limit=8):
    return value * 35 + limit
